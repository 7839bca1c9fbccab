// Open files, whole transfers, and what of a file is in the page cache.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "errors.hpp"
#include "memory.hpp"

namespace native {

class File {
 public:
  File() = default;

  File(std::string path, int flags, mode_t mode = 0644) : path_(std::move(path)) {
    fd_ = ::open(path_.c_str(), flags | O_CLOEXEC, mode);
    if (fd_ >= 0) return;
    if (errno == EINVAL && (flags & O_DIRECT) != 0)
      throw Unavailable(path_ + ": this file system does not take direct I/O; use --direct off");
    throw_errno(path_ + ": open");
  }

  File(File&& other) noexcept { swap(other); }
  File& operator=(File&& other) noexcept {
    swap(other);
    return *this;
  }
  ~File() {
    if (fd_ >= 0) ::close(fd_);
  }

  int fd() const { return fd_; }
  const std::string& path() const { return path_; }

  std::uint64_t size() const {
    struct stat status {};
    if (::fstat(fd_, &status) != 0) throw_errno(path_ + ": fstat");
    return static_cast<std::uint64_t>(status.st_size);
  }

  // A close that fails means lost data.
  void close() {
    const int fd = std::exchange(fd_, -1);
    if (fd >= 0 && ::close(fd) != 0) throw_errno(path_ + ": close");
  }

  void sync() const {
    if (::fsync(fd_) != 0) throw_errno(path_ + ": fsync");
  }

 private:
  void swap(File& other) {
    std::swap(path_, other.path_);
    std::swap(fd_, other.fd_);
  }

  std::string path_;
  int fd_ = -1;
};

inline void sync_directory(const std::string& path) { File(path, O_RDONLY | O_DIRECTORY).sync(); }

// What came of a transfer: `done` is its result, a count or a negative error number. Less than `expected` is an error;
// more is one, too, as it means that the file is longer than it was.
inline void check_transfer(const std::string& path, const char* what, std::uint64_t offset, std::int64_t done,
                           std::uint64_t expected) {
  const std::string where = path + ": " + what + " at offset " + std::to_string(offset);
  if (done == -EINVAL)
    throw Unavailable(where + ": Invalid argument; this file system may need another alignment, or --direct off");
  if (done < 0) throw_errno(where, static_cast<int>(-done));
  if (static_cast<std::uint64_t>(done) != expected)
    throw Failure(where + ": " + std::to_string(done) + " instead of " + std::to_string(expected) + " bytes");
}

inline std::int64_t read_at(int fd, void* data, std::uint64_t nbytes, std::uint64_t offset) {
  ssize_t done = 0;
  do done = ::pread(fd, data, nbytes, static_cast<off_t>(offset));
  while (done < 0 && errno == EINTR);
  return done < 0 ? -errno : done;
}

inline std::int64_t write_at(int fd, const void* data, std::uint64_t nbytes, std::uint64_t offset) {
  ssize_t done = 0;
  do done = ::pwrite(fd, data, nbytes, static_cast<off_t>(offset));
  while (done < 0 && errno == EINTR);
  return done < 0 ? -errno : done;
}

// Bytes of the file in the page cache, in whole pages.
inline std::uint64_t cached_bytes(const File& file) {
  const std::uint64_t nbytes = file.size();
  if (nbytes == 0) return 0;
  void* map = ::mmap(nullptr, nbytes, PROT_READ, MAP_SHARED, file.fd(), 0);
  if (map == MAP_FAILED) throw_errno(file.path() + ": mmap");
  std::vector<unsigned char> pages((nbytes + page_size - 1) / page_size);
  const int result = ::mincore(map, nbytes, pages.data());
  const int code = errno;
  ::munmap(map, nbytes);
  if (result != 0) throw_errno(file.path() + ": mincore", code);
  std::uint64_t cached = 0;
  for (unsigned char page : pages) cached += page & 1u;
  return cached * page_size;
}

// Drops the file's clean pages from the page cache.
inline void uncache(const File& file) {
  const int code = ::posix_fadvise(file.fd(), 0, 0, POSIX_FADV_DONTNEED);
  if (code != 0) throw_errno(file.path() + ": posix_fadvise", code);
}

// Files of our own: removed when this goes, whatever happens. A killed process leaves them; its caller removes DIR.
class OwnFiles {
 public:
  OwnFiles() = default;
  OwnFiles(const OwnFiles&) = delete;
  OwnFiles& operator=(const OwnFiles&) = delete;
  ~OwnFiles() { remove(); }

  std::string add(const std::string& directory, const char* program) {
    paths_.push_back(directory + "/" + program + "-" + std::to_string(::getpid()) + "-" +
                     std::to_string(paths_.size()) + ".bin");
    return paths_.back();
  }

  const std::vector<std::string>& paths() const { return paths_; }

  void remove() {
    for (const std::string& path : paths_) ::unlink(path.c_str());
  }

  void keep() { paths_.clear(); }

 private:
  std::vector<std::string> paths_;
};

}  // namespace native
