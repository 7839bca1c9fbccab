// How fast does memory get copied into warm memory, and into fresh memory that gets its pages on the way?
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "flags.hpp"
#include "measure.hpp"
#include "memory.hpp"
#include "pattern.hpp"
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

using namespace native;

namespace {

// Words that differ from what the source holds, so that a block that was not copied shows.
void poison(char* data, std::uint64_t nbytes, std::uint64_t samples) {
  for (std::uint64_t n = 0; n < samples; ++n) std::memset(data + sample_place(n, samples, nbytes, 8), 0, 8);
}

void check(const char* source, const char* target, std::uint64_t nbytes, std::uint64_t samples) {
  for (std::uint64_t n = 0; n < samples; ++n) {
    const std::uint64_t place = sample_place(n, samples, nbytes, 8);
    if (std::memcmp(source + place, target + place, 8) != 0)
      throw Failure("the copy differs from its source at byte " + std::to_string(place));
  }
}

#if defined(__x86_64__)
constexpr bool can_stream = true;

// Stores that pass the caches by, which libc's memcpy has for its longest calls only. Targets are aligned to pages.
void stream(char* to, const char* from, std::uint64_t nbytes) {
  std::uint64_t at = 0;
  const auto lines = [&](std::uint64_t step) {
    for (; at + step <= nbytes; at += step) {
      // Past the source's end, a prefetch does nothing.
      const std::uintptr_t ahead = reinterpret_cast<std::uintptr_t>(from) + at + 4096;
      for (std::uint64_t line = 0; line < step; line += 64)
        _mm_prefetch(reinterpret_cast<const char*>(ahead + line), _MM_HINT_NTA);
      for (std::uint64_t word = 0; word < step; word += 16)
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + at + word),
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at + word)));
    }
  };
  lines(256);
  lines(64);
  _mm_sfence();
  std::memcpy(to + at, from + at, nbytes - at);
}
#else
constexpr bool can_stream = false;

void stream(char*, const char*, std::uint64_t) {}
#endif

}  // namespace

int main(int argc, char** argv) {
  return guarded("memcpy", [&] {
    std::uint64_t nbytes = 1 << 30, threads = 1, repeat = 5, block = 0;
    std::string into = "warm", pages = "4k", stores = "libc";
    Flags flags("memcpy", "Copies memory. Source and target are apart and larger than the caches.");
    flags.size("bytes", &nbytes, page_size, 1ULL << 40, "bytes to copy");
    flags.count("threads", &threads, 1, 1024, "threads");
    flags.choice("into", &into, {"warm", "fresh"}, "memory that has its pages, or gets them while it is copied into");
    flags.choice("pages", &pages, {"4k", "huge"}, "pages of the target");
    flags.choice("stores", &stores, {"libc", "streaming"}, "memcpy, or non-temporal stores, which pass the caches by");
    flags.size("block", &block, 0, 1ULL << 40,
               "bytes per copy, handed out to the threads in turn; 0: each thread copies its share at once");
    flags.count("repeat", &repeat, 1, 1000, "times to measure");
    flags.parse(argc, argv);
    const bool streams = stores == "streaming";
    if (streams && !can_stream) throw Unavailable("this program has non-temporal stores for x86-64 only");
    if (streams && block % 64 != 0) throw UsageError("--block: non-temporal stores take multiples of 64 bytes");
    if (block == 0) block = round_up((nbytes + threads - 1) / threads, page_size);

    const Memory source(nbytes, Pages::small);
    fill_pattern_parallel(source.data(), nbytes, 1, threads);
    const std::uint64_t blocks = (nbytes + block - 1) / block, samples = 4096;
    Memory target(nbytes, parse_pages(pages));
    if (into == "warm") Memory::populate(target.data(), nbytes);
    std::uint64_t huge = 0;
    Repeats repeats;
    for (std::uint64_t round = 0; round < repeat; ++round) {
      if (into == "warm") {
        poison(target.data(), nbytes, samples);
      } else {
        target = Memory();  // gives the old pages back first
        target = Memory(nbytes, parse_pages(pages));
      }
      Queue queue(blocks);
      repeats.time([&] {
        return run_threads(threads, [&](std::uint64_t) {
          for (std::uint64_t index; queue.take(&index);) {
            const std::uint64_t at = index * block;
            const std::uint64_t length = std::min(block, nbytes - at);
            if (streams)
              stream(target.data() + at, source.data() + at, length);
            else
              std::memcpy(target.data() + at, source.data() + at, length);
          }
        });
      });
      check(source.data(), target.data(), nbytes, samples);
      huge = target.huge_bytes();
    }
    Json json = report(flags, nbytes, repeats);
    json.add("huge_page_bytes", huge);
    print(json);
  });
}
