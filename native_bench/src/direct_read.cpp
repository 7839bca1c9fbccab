// How fast do files get from the storage into memory?
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "flags.hpp"
#include "inputs.hpp"
#include "measure.hpp"
#include "memory.hpp"
#include "transfer.hpp"

using namespace native;

namespace {

enum class Into { target, copy, pool };

// What a read into the pool must overwrite: nothing else is left to compare afterwards.
constexpr std::uint64_t mark = 0x6e6f7420726561ULL;

struct Reader {
  static constexpr bool writes = false;

  const std::vector<File>& files;
  Into into;
  bool direct;
  std::uint64_t block, depth;
  char* target;
  char* pool;

  int fd(const Block& b) const { return files[b.file].fd(); }
  const std::string& path(const Block& b) const { return files[b.file].path(); }
  char* slot(std::uint64_t thread, std::uint64_t n) const { return pool + (thread * depth + n) * block; }
  char* memory(std::uint64_t thread, std::uint64_t n, const Block& b) const {
    if (into == Into::target) return target + b.place;
    if (into == Into::pool) std::memcpy(slot(thread, n), &mark, 8);
    return slot(thread, n);
  }
  // A direct read's length is aligned, too: the last one of a file asks for more than there is.
  std::uint64_t length(const Block& b) const { return direct ? round_up(b.nbytes, page_size) : b.nbytes; }
  void done(std::uint64_t thread, std::uint64_t n, const Block& b) const {
    if (into == Into::copy) std::memcpy(target + b.place, slot(thread, n), b.nbytes);
    if (into == Into::pool && b.nbytes >= 8 && std::memcmp(slot(thread, n), &mark, 8) == 0)
      throw Failure(path(b) + ": the read at offset " + std::to_string(b.offset) + " left its buffer unchanged");
  }
};

}  // namespace

int main(int argc, char** argv) {
  return guarded("direct_read", [&] {
    Inputs inputs;
    Knobs knobs;
    std::string into = "target", pages = "4k", pool_pages = "4k";
    bool direct = true;
    std::uint64_t repeat = 3;
    Flags flags("direct_read",
                "Reads files from first to last byte, past the page cache, into memory that has its pages.");
    inputs.flags(flags);
    knobs.flags(flags);
    flags.choice("into", &into, {"target", "copy", "pool"},
                 "straight to each byte's place in one large buffer, as a restore has to; there by way of a pool of a "
                 "few buffers; or only into the pool");
    flags.choice("pages", &pages, {"4k", "huge"}, "pages of the large buffer");
    flags.choice("pool-pages", &pool_pages, {"4k", "huge"}, "pages of the pool");
    flags.on_off("direct", &direct, "O_DIRECT; off: through the page cache, which is dropped for these files before");
    flags.count("repeat", &repeat, 1, 1000, "times to measure");
    flags.parse(argc, argv);
    knobs.check();
    inputs.prepare("direct_read");

    const Plan plan(inputs.sizes, knobs.block);
    const Into where = into == "target" ? Into::target : into == "copy" ? Into::copy : Into::pool;
    Memory target, pool;
    if (where != Into::pool) target = Memory(plan.memory_nbytes, parse_pages(pages));
    if (where != Into::target) pool = Memory(knobs.threads * knobs.depth * knobs.block, parse_pages(pool_pages));
    for (Memory* memory : {&target, &pool}) Memory::populate(memory->data(), memory->size());
    std::vector<File> files;
    for (const std::string& path : inputs.paths) files.emplace_back(path, direct ? O_RDONLY | O_DIRECT : O_RDONLY);

    const Samples samples(plan, inputs);
    Reader reader{files, where, direct, knobs.block, knobs.depth, target.data(), pool.data()};
    Transfer transfer(knobs, plan, reader);
    Repeats repeats;
    std::vector<double> cached;
    for (std::uint64_t round = 0; round < repeat; ++round) {
      if (!direct)
        for (const File& file : files) uncache(file);
      std::uint64_t before = 0;
      for (const File& file : files) before += cached_bytes(file);
      cached.push_back(static_cast<double>(before));
      if (where != Into::pool) samples.poison(target.data());
      repeats.time([&] { return transfer.run(); });
      if (where != Into::pool) samples.check(target.data(), inputs);
    }
    Json json = report(flags, plan.nbytes, repeats);
    json.add("cached_bytes_before", cached);
    json.add("huge_page_bytes", target.size() != 0 ? target.huge_bytes() : pool.huge_bytes());
    json.add("samples_checked", where == Into::pool ? 0 : samples.count());
    print(json);
  });
}
