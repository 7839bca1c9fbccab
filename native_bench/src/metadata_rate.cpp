// How many small files a second can be made durable, read, renamed, removed?
#include <sys/stat.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "file.hpp"
#include "flags.hpp"
#include "measure.hpp"
#include "memory.hpp"
#include "pattern.hpp"

using namespace native;

namespace {

// A directory of our own and the files in it: removed when this goes.
class Scratch {
 public:
  explicit Scratch(const std::string& parent) : path_(parent + "/metadata_rate-" + std::to_string(::getpid())) {
    if (::mkdir(path_.c_str(), 0755) != 0) throw_errno(path_ + ": mkdir");
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() {
    for (std::uint64_t n = 0; n < used_; ++n) {
      ::unlink(name(n, false).c_str());
      ::unlink(name(n, true).c_str());
    }
    ::rmdir(path_.c_str());
  }

  void use(std::uint64_t files) { used_ = files; }
  const std::string& path() const { return path_; }
  std::string name(std::uint64_t n, bool renamed) const {
    return path_ + (renamed ? "/renamed-" : "/file-") + std::to_string(n);
  }

  // rmdir refuses a directory that still holds something.
  void check_empty() const {
    if (::rmdir(path_.c_str()) != 0) throw_errno(path_ + ": not empty after all files were removed");
    if (::mkdir(path_.c_str(), 0755) != 0) throw_errno(path_ + ": mkdir");
  }

 private:
  std::string path_;
  std::uint64_t used_ = 0;
};

struct Phase {
  const char* name;
  std::vector<double> seconds;
};

}  // namespace

int main(int argc, char** argv) {
  return guarded("metadata_rate", [&] {
    std::string directory = ".";
    std::uint64_t files = 1000, size = 4096, threads = 1, repeat = 3;
    bool sync = true;
    Flags flags("metadata_rate",
                "Makes small files in one directory, reads them, renames them, removes them; each phase timed apart.");
    flags.text("dir", &directory, "DIR", "where to make a directory for the files; it is removed at the end");
    flags.count("files", &files, 1, 10000000, "files");
    flags.size("size", &size, 1, 64 << 20, "bytes per file");
    flags.on_off("fsync", &sync, "fsync each file before it is closed");
    flags.count("threads", &threads, 1, 1024, "threads, which share the files");
    flags.count("repeat", &repeat, 1, 1000, "times to measure");
    flags.parse(argc, argv);

    Scratch scratch(directory);
    scratch.use(files);
    const Memory source(size + 8 * files, Pages::small), target(threads * round_up(size, page_size), Pages::small);
    fill_pattern(source.data(), source.size(), 1, 0);
    Phase phases[] = {{"create", {}}, {"read", {}}, {"rename", {}}, {"unlink", {}}};
    // File n holds the pattern from word n on: no two are equal.
    const auto contents = [&](std::uint64_t n) { return source.data() + 8 * n; };
    const auto each = [&](Phase& phase, auto&& operation) {
      Queue queue(files);
      phase.seconds.push_back(run_threads(threads, [&](std::uint64_t t) {
        try {
          for (std::uint64_t n; queue.take(&n);) operation(n, target.data() + t * round_up(size, page_size));
        } catch (...) {
          queue.stop();
          throw;
        }
      }));
    };
    Repeats repeats;
    for (std::uint64_t round = 0; round < repeat; ++round) {
      const double cpu = cpu_now();
      each(phases[0], [&](std::uint64_t n, char*) {
        File file(scratch.name(n, false), O_WRONLY | O_CREAT | O_EXCL);
        check_transfer(file.path(), "write", 0, write_at(file.fd(), contents(n), size, 0), size);
        if (sync) file.sync();
        file.close();
      });
      each(phases[1], [&](std::uint64_t n, char* buffer) {
        File file(scratch.name(n, false), O_RDONLY);
        check_transfer(file.path(), "read", 0, read_at(file.fd(), buffer, size, 0), size);
        file.close();
        if (std::memcmp(buffer, contents(n), size) != 0) throw Failure(file.path() + ": not what was written");
      });
      each(phases[2], [&](std::uint64_t n, char*) {
        if (::rename(scratch.name(n, false).c_str(), scratch.name(n, true).c_str()) != 0)
          throw_errno(scratch.name(n, false) + ": rename");
      });
      each(phases[3], [&](std::uint64_t n, char*) {
        if (::unlink(scratch.name(n, true).c_str()) != 0) throw_errno(scratch.name(n, true) + ": unlink");
      });
      repeats.cpu_seconds.push_back(cpu_now() - cpu);
      double total = 0;
      for (const Phase& phase : phases) total += phase.seconds.back();
      repeats.seconds.push_back(total);
      scratch.check_empty();
    }
    Json json = report(flags, files * size, repeats);
    Json apart;
    for (const Phase& phase : phases) {
      Json one;
      one.add("seconds", phase.seconds);
      one.add("files_s_median", static_cast<double>(files) / median(phase.seconds));
      apart.add(phase.name, one);
    }
    json.add("phases", apart);
    print(json);
  });
}
