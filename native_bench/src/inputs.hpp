// The files a reading program reads: those it is given, or its own, filled with the pattern.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "file.hpp"
#include "flags.hpp"
#include "memory.hpp"
#include "pattern.hpp"
#include "transfer.hpp"

namespace native {

class Inputs {
 public:
  void flags(Flags& flags) {
    flags.text("dir", &directory_, "DIR", "make files here, read them, remove them");
    flags.size("bytes", &nbytes_, page_size, 1ULL << 44, "bytes of the files made in --dir, together");
    flags.count("files", &files_, 1, 100000, "files made in --dir");
    flags.positional("PATH", &paths, "files to read instead; they are not changed");
  }

  // After the flags are parsed: `paths` and `sizes` are those of the files to read. Files made here are not in the
  // page cache afterwards.
  void prepare(const char* program) {
    if (paths.empty() == directory_.empty()) throw UsageError("name the files to read, or --dir DIR to make some in");
    if (paths.empty()) make(program);
    for (const std::string& path : paths) {
      const File file(path, O_RDONLY);
      struct stat status {};
      if (::fstat(file.fd(), &status) != 0) throw_errno(path + ": fstat");
      if (!S_ISREG(status.st_mode)) throw UsageError(path + ": no regular file");
      sizes.push_back(file.size());
      total += sizes.back();
    }
    if (total == 0) throw UsageError("the files to read are empty");
  }

  std::vector<std::string> paths;
  std::vector<std::uint64_t> sizes;
  std::uint64_t total = 0;

 private:
  void make(const char* program) {
    constexpr std::uint64_t step = 8 << 20;
    const Memory buffer(step, Pages::small);
    const std::uint64_t each = (nbytes_ + files_ - 1) / files_;
    std::uint64_t left = nbytes_;
    for (std::uint64_t n = 0; n < files_ && left > 0; ++n) {
      const std::uint64_t size = std::min(each, left);
      File file(made_.add(directory_, program), O_WRONLY | O_CREAT | O_EXCL);
      for (std::uint64_t at = 0; at < size; at += step) {
        const std::uint64_t length = std::min(step, size - at);
        fill_pattern(buffer.data(), length, n, at);
        check_transfer(file.path(), "write", at, write_at(file.fd(), buffer.data(), length, at), length);
      }
      file.sync();
      uncache(file);
      file.close();
      left -= size;
    }
    paths = made_.paths();
  }

  std::string directory_;
  std::uint64_t nbytes_ = 1 << 30, files_ = 1;
  OwnFiles made_;
};

// Compares memory with what the files hold, at some places of each file: the first bytes, the last, and places that
// no block size lines up with. The files are read past the page cache where they can be, to leave it as it is.
class Samples {
 public:
  static constexpr std::uint64_t per_file_most = 64, nbytes = 64;

  Samples(const Plan& plan, const Inputs& inputs) : plan_(plan) {
    const std::uint64_t files = inputs.paths.size();
    const std::uint64_t per_file = std::max<std::uint64_t>(3, std::min(per_file_most, 4096 / files));
    const Memory buffer(2 * page_size, Pages::small);
    for (std::uint64_t n = 0; n < files; ++n) {
      if (inputs.sizes[n] == 0) continue;
      const File file = open_past_cache(inputs.paths[n]);
      for (std::uint64_t k = 0; k < per_file; ++k) {
        Sample sample{n, sample_place(k, per_file, inputs.sizes[n], nbytes), {}};
        const std::uint64_t length = std::min(nbytes, inputs.sizes[n] - sample.offset);
        const std::uint64_t begin = sample.offset / page_size * page_size;
        const std::int64_t done = read_at(file.fd(), buffer.data(), 2 * page_size, begin);
        check_transfer(file.path(), "read", begin, done, std::min(2 * page_size, inputs.sizes[n] - begin));
        sample.bytes.assign(buffer.data() + (sample.offset - begin), length);
        samples_.push_back(std::move(sample));
      }
    }
  }

  // Makes the places of `memory` differ from the files, so that a block that is not read shows.
  void poison(char* memory) const {
    for (const Sample& sample : samples_)
      for (std::uint64_t i = 0; i < sample.bytes.size(); ++i)
        memory[plan_.places[sample.file] + sample.offset + i] = static_cast<char>(~sample.bytes[i]);
  }

  void check(const char* memory, const Inputs& inputs) const {
    for (const Sample& sample : samples_)
      if (std::memcmp(memory + plan_.places[sample.file] + sample.offset, sample.bytes.data(), sample.bytes.size()) != 0)
        throw Failure(inputs.paths[sample.file] + ": what was read differs from the file at offset " +
                      std::to_string(sample.offset));
  }

  std::uint64_t count() const { return samples_.size(); }

 private:
  struct Sample {
    std::uint64_t file, offset;
    std::string bytes;
  };

  static File open_past_cache(const std::string& path) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (fd >= 0) ::close(fd);
    return File(path, fd >= 0 ? O_RDONLY | O_DIRECT : O_RDONLY);
  }

  const Plan& plan_;
  std::vector<Sample> samples_;
};

}  // namespace native
