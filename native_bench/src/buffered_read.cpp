// How fast do files get from the page cache into memory?
#include <cstdint>
#include <string>
#include <vector>

#include "flags.hpp"
#include "inputs.hpp"
#include "measure.hpp"
#include "memory.hpp"
#include "transfer.hpp"

using namespace native;

namespace {

struct Reader {
  static constexpr bool writes = false;

  const std::vector<File>& files;
  char* target;

  int fd(const Block& b) const { return files[b.file].fd(); }
  const std::string& path(const Block& b) const { return files[b.file].path(); }
  char* memory(std::uint64_t, std::uint64_t, const Block& b) const { return target + b.place; }
  std::uint64_t length(const Block& b) const { return b.nbytes; }
  void done(std::uint64_t, std::uint64_t, const Block&) const {}
};

}  // namespace

int main(int argc, char** argv) {
  return guarded("buffered_read", [&] {
    Inputs inputs;
    Knobs knobs;
    knobs.block = 1 << 20;
    std::string pages = "4k";
    std::uint64_t repeat = 5;
    Flags flags("buffered_read",
                "Reads files that are in the page cache (they are read once before) into memory that has its pages.");
    inputs.flags(flags);
    flags.size("block", &knobs.block, page_size, 1 << 30, "bytes per call, a multiple of 4096");
    flags.count("threads", &knobs.threads, 1, 1024, "threads");
    flags.choice("pages", &pages, {"4k", "huge"}, "pages of the memory that is read into");
    flags.count("repeat", &repeat, 1, 1000, "times to measure");
    flags.parse(argc, argv);
    knobs.check();
    inputs.prepare("buffered_read");

    const Plan plan(inputs.sizes, knobs.block);
    const Memory target(plan.memory_nbytes, parse_pages(pages));
    Memory::populate(target.data(), target.size());
    std::vector<File> files;
    for (const std::string& path : inputs.paths) files.emplace_back(path, O_RDONLY);

    const Samples samples(plan, inputs);
    Reader reader{files, target.data()};
    Transfer transfer(knobs, plan, reader);
    Repeats repeats;
    transfer.run();
    for (std::uint64_t round = 0; round < repeat; ++round) {
      std::uint64_t cached = 0;
      for (const File& file : files) cached += cached_bytes(file);
      // A kernel that reclaims memory ahead of need takes a page here and there, which shows in no figure.
      if (cached < plan.nbytes - plan.nbytes / 100)
        throw Failure("only " + std::to_string(cached) + " of " + std::to_string(plan.nbytes) +
                      " bytes stayed in the page cache after they were read: too little memory");
      samples.poison(target.data());
      repeats.time([&] { return transfer.run(); });
      samples.check(target.data(), inputs);
    }
    Json json = report(flags, plan.nbytes, repeats);
    json.add("huge_page_bytes", target.huge_bytes());
    json.add("samples_checked", samples.count());
    print(json);
  });
}
