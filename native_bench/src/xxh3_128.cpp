// How fast are blocks digested with xxh3-128?
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "flags.hpp"
#include "measure.hpp"
#include "memory.hpp"
#include "pattern.hpp"

using namespace native;

using Digest = std::array<unsigned char, 16>;
using Function = void (*)(const void*, std::size_t, unsigned char[16]);

#ifdef NATIVE_BENCH_X86
void xxh3_128_sse2(const void*, std::size_t, unsigned char[16]);
void xxh3_128_avx2(const void*, std::size_t, unsigned char[16]);
void xxh3_128_avx512(const void*, std::size_t, unsigned char[16]);
#endif

namespace {

void xxh3_128_library(const void* data, std::size_t nbytes, unsigned char digest[16]) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(data, nbytes));
  std::memcpy(digest, canonical.digest, sizeof canonical.digest);
}

// The name is replaced by the one that is meant, where it is "auto".
Function choose(std::string* code) {
#ifdef NATIVE_BENCH_X86
  const bool avx512 = __builtin_cpu_supports("avx512f"), avx2 = __builtin_cpu_supports("avx2");
  if (*code == "auto") *code = avx512 ? "avx512" : avx2 ? "avx2" : "sse2";
  if ((*code == "avx512" && !avx512) || (*code == "avx2" && !avx2))
    throw Unavailable("--code: this processor has no " + *code);
  if (*code == "avx512") return xxh3_128_avx512;
  if (*code == "avx2") return xxh3_128_avx2;
  if (*code == "sse2") return xxh3_128_sse2;
#else
  if (*code == "auto") *code = "library";
  if (*code != "library") throw Unavailable("--code: this is no x86-64; use library");
#endif
  return xxh3_128_library;
}

Digest digest_of(Function function, const void* data, std::size_t nbytes) {
  Digest digest{};
  function(data, nbytes, digest.data());
  return digest;
}

}  // namespace

int main(int argc, char** argv) {
  return guarded("xxh3_128", [&] {
    std::uint64_t nbytes = 1 << 30, threads = 1, block = 8 << 20, repeat = 5;
    std::string code = "auto";
    Flags flags("xxh3_128", "Digests memory, block by block.");
    flags.size("bytes", &nbytes, page_size, 1ULL << 40, "bytes to digest; what fits into the caches is faster");
    flags.size("block", &block, 1, 1ULL << 40, "bytes per digest");
    flags.count("threads", &threads, 1, 1024, "threads");
    flags.choice("code", &code, {"auto", "sse2", "avx2", "avx512", "library"},
                 "compiled for an instruction set, the best one that the processor has, or as in the shared library");
    flags.count("repeat", &repeat, 1, 1000, "times to measure");
    flags.parse(argc, argv);
    const Function function = choose(&code);

    constexpr Digest of_nothing = {0x99, 0xaa, 0x06, 0xd3, 0x01, 0x47, 0x98, 0xd8,
                                   0x60, 0x01, 0xc3, 0x24, 0x46, 0x8d, 0x49, 0x7f};
    if (digest_of(function, "", 0) != of_nothing) throw Failure("the digest of nothing is not what xxh3-128 defines");
    const Memory data(nbytes, Pages::small);
    fill_pattern_parallel(data.data(), nbytes, 1, threads);
    const std::uint64_t blocks = (nbytes + block - 1) / block;
    const auto length = [&](std::uint64_t index) { return std::min(block, nbytes - index * block); };
    std::vector<Digest> digests(blocks);
    Repeats repeats;
    for (std::uint64_t round = 0; round < repeat; ++round) {
      std::fill(digests.begin(), digests.end(), Digest{});
      Queue queue(blocks);
      repeats.time([&] {
        return run_threads(threads, [&](std::uint64_t) {
          for (std::uint64_t index; queue.take(&index);)
            function(data.data() + index * block, length(index), digests[index].data());
        });
      });
      // The shared library is another build of the algorithm: the two have to agree.
      for (std::uint64_t n = 0; n < 16; ++n) {
        const std::uint64_t index = n < 15 ? n * blocks / 16 : blocks - 1;
        if (digests[index] != digest_of(xxh3_128_library, data.data() + index * block, length(index)))
          throw Failure("block " + std::to_string(index) + ": the digest is not the library's");
      }
    }
    Json json = report(flags, nbytes, repeats);
    json.add("code", code);
    print(json);
  });
}
