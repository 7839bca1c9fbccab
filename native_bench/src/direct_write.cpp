// How fast do bytes get from memory onto the storage, durably?
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "file.hpp"
#include "flags.hpp"
#include "measure.hpp"
#include "memory.hpp"
#include "pattern.hpp"
#include "transfer.hpp"

using namespace native;

namespace {

struct Writer {
  static constexpr bool writes = true;

  const std::vector<File>& files;
  char* source;

  int fd(const Block& b) const { return files[b.file].fd(); }
  const std::string& path(const Block& b) const { return files[b.file].path(); }
  char* memory(std::uint64_t, std::uint64_t, const Block& b) const { return source + b.place; }
  std::uint64_t length(const Block& b) const { return b.nbytes; }
  void done(std::uint64_t, std::uint64_t, const Block&) const {}
};

// Reads some places of the files back, past the page cache where that is how they were written.
void check(const std::vector<std::string>& paths, const Plan& plan, const std::vector<std::uint64_t>& sizes,
           const char* source, bool direct) {
  const Memory buffer(page_size, Pages::small);
  for (std::uint64_t n = 0; n < paths.size(); ++n) {
    const File file(paths[n], direct ? O_RDONLY | O_DIRECT : O_RDONLY);
    if (file.size() != sizes[n])
      throw Failure(paths[n] + ": " + std::to_string(file.size()) + " bytes long after writing " +
                    std::to_string(sizes[n]));
    for (std::uint64_t k = 0, count = 64; k < count; ++k) {
      const std::uint64_t at = sample_place(k, count, sizes[n], page_size) / page_size * page_size;
      const std::uint64_t length = std::min(page_size, sizes[n] - at);
      check_transfer(paths[n], "read", at, read_at(file.fd(), buffer.data(), length, at), length);
      if (std::memcmp(buffer.data(), source + plan.places[n] + at, length) != 0)
        throw Failure(paths[n] + ": the file differs from what was written, at offset " + std::to_string(at));
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  return guarded("direct_write", [&] {
    Knobs knobs;
    std::string directory = ".", pages = "4k";
    std::uint64_t nbytes = 1 << 30, files = 1, repeat = 3;
    bool preallocate = true, direct = true, overwrite = false, sync = true, keep = false;
    Flags flags("direct_write",
                "Makes files, writes them from memory past the page cache, and waits until they are durable: create,\n"
                "preallocate, write, fsync of the files, close, fsync of the directory.");
    flags.text("dir", &directory, "DIR", "where to make the files; they are removed at the end");
    flags.size("bytes", &nbytes, page_size, 1ULL << 44, "bytes of the files together, a multiple of 4096");
    flags.count("files", &files, 1, 100000, "files");
    knobs.flags(flags);
    flags.choice("pages", &pages, {"4k", "huge"}, "pages of the memory that is written from");
    flags.on_off("preallocate", &preallocate, "fallocate the files before the first write");
    flags.on_off("direct", &direct, "O_DIRECT; off: through the page cache");
    flags.on_off("fsync", &sync, "wait until the bytes are durable");
    flags.on_off("overwrite", &overwrite, "write over the same files in each repeat but an untimed first");
    flags.on_off("keep", &keep, "leave the files of the last repeat, and name them in the result");
    flags.count("repeat", &repeat, 1, 1000, "times to measure");
    flags.parse(argc, argv);
    knobs.check();
    if (nbytes % page_size != 0) throw UsageError("--bytes: " + std::to_string(nbytes) + " is no multiple of 4096");
    files = std::min(files, nbytes / page_size);

    std::vector<std::uint64_t> sizes;
    const std::uint64_t each = round_up((nbytes + files - 1) / files, page_size);
    for (std::uint64_t left = nbytes; left > 0; left -= sizes.back()) sizes.push_back(std::min(each, left));
    const Plan plan(sizes, knobs.block);
    // All bytes are in memory and each is written once, as a save finds them: a small buffer would come from the caches.
    const Memory source(plan.memory_nbytes, parse_pages(pages));
    OwnFiles own;
    for (std::uint64_t n = 0; n < sizes.size(); ++n) own.add(directory, "direct_write");
    const std::vector<std::string> paths = own.paths();

    std::vector<File> opened;
    Writer writer{opened, source.data()};
    Transfer transfer(knobs, plan, writer);
    Repeats repeats;
    std::vector<double> create_seconds, write_seconds, fsync_seconds;
    for (std::uint64_t round = 0; round < repeat + (overwrite ? 1 : 0); ++round) {
      // Other bytes each time: a write that is lost over an older file would not show else.
      fill_pattern_parallel(source.data(), plan.memory_nbytes, round, knobs.threads);
      opened.clear();
      if (!overwrite) own.remove();
      sync_directory(directory);  // what is left of the last repeat is not ours to wait for
      const double cpu = cpu_now(), begin = now();
      for (std::uint64_t n = 0; n < sizes.size(); ++n) {
        const int create = overwrite && round != 0 ? 0 : O_CREAT | O_EXCL;
        opened.emplace_back(paths[n], O_WRONLY | create | (direct ? O_DIRECT : 0));
        if (preallocate && create != 0) {
          if (::fallocate(opened.back().fd(), 0, 0, static_cast<off_t>(sizes[n])) != 0) {
            if (errno == EOPNOTSUPP)
              throw Unavailable(paths[n] + ": this file system cannot preallocate; use --preallocate off");
            throw_errno(paths[n] + ": fallocate");
          }
        }
      }
      const double created = now();
      const double writing = transfer.run();
      const double written = now();
      if (sync) {
        Queue queue(sizes.size());
        run_threads(std::min<std::uint64_t>(knobs.threads, sizes.size()), [&](std::uint64_t) {
          for (std::uint64_t index; queue.take(&index);) opened[index].sync();
        });
      }
      for (File& file : opened) file.close();
      if (sync) sync_directory(directory);
      const double end = now();
      if (!overwrite || round != 0) {
        repeats.seconds.push_back(end - begin);
        repeats.cpu_seconds.push_back(cpu_now() - cpu);
        create_seconds.push_back(created - begin);
        write_seconds.push_back(writing);
        fsync_seconds.push_back(end - written);
      }
      check(paths, plan, sizes, source.data(), direct);
    }
    Json json = report(flags, plan.nbytes, repeats);
    json.add("create_seconds", create_seconds);
    json.add("write_seconds", write_seconds);
    json.add("fsync_seconds", fsync_seconds);
    json.add("huge_page_bytes", source.huge_bytes());
    if (keep) {
      json.add("kept", paths);
      own.keep();
    }
    print(json);
  });
}
