// How fast does zstd compress and decompress blocks of a kind of data, and by how much?
#include <zstd.h>

#include <cmath>
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numbers>
#include <string>
#include <vector>

#include "file.hpp"
#include "flags.hpp"
#include "measure.hpp"
#include "memory.hpp"
#include "pattern.hpp"

using namespace native;

namespace {

struct FreeCompressor {
  void operator()(ZSTD_CCtx* context) const { ZSTD_freeCCtx(context); }
};
struct FreeDecompressor {
  void operator()(ZSTD_DCtx* context) const { ZSTD_freeDCtx(context); }
};

// N(0, 0.02), what freshly made weights are, rounded to bfloat16.
void fill_bf16_normal(char* data, std::uint64_t nbytes, std::uint64_t seed) {
  const auto uniform = [](std::uint64_t bits) { return (static_cast<double>(bits) + 1.0) * 0x1p-32; };
  for (std::uint64_t at = 0; at + 1 < nbytes; at += 4) {
    const std::uint64_t word = pattern_word(seed, at / 4);  // two uniforms: Box and Muller make two normals of them
    const double radius = 0.02 * std::sqrt(-2.0 * std::log(uniform(word >> 32)));
    const double angle = 2.0 * std::numbers::pi * uniform(word & 0xffffffff);
    const float values[2] = {static_cast<float>(radius * std::cos(angle)), static_cast<float>(radius * std::sin(angle))};
    for (std::uint64_t n = 0; n < 2 && at + 2 * n + 1 < nbytes; ++n) {
      std::uint32_t bits = 0;
      std::memcpy(&bits, &values[n], 4);
      bits += 0x7fff + (bits >> 16 & 1);  // to nearest, ties to even
      const auto half = static_cast<std::uint16_t>(bits >> 16);
      std::memcpy(data + at + 2 * n, &half, 2);
    }
  }
}

void fill(char* data, std::uint64_t nbytes, const std::string& kind, std::uint64_t block, std::uint64_t threads) {
  if (kind == "zeros") {
    Memory::populate(data, nbytes);
  } else if (kind == "random") {
    fill_pattern_parallel(data, nbytes, 1, threads);
  } else if (kind == "bf16-normal") {
    // Blocks are compressed apart, so equal ones cost and save nothing: some megabytes of normals are enough.
    const std::uint64_t stretch = std::min(nbytes, round_up(8 << 20, block));
    fill_bf16_normal(data, stretch, 1);
    for (std::uint64_t at = stretch; at < nbytes; at += stretch)
      std::memcpy(data + at, data, std::min(stretch, nbytes - at));
  } else {
    const File file(kind.substr(5), O_RDONLY);
    for (std::uint64_t at = 0; at < nbytes;) {
      const std::uint64_t length = std::min<std::uint64_t>(8 << 20, nbytes - at);
      check_transfer(file.path(), "read", at, read_at(file.fd(), data + at, length, at), length);
      at += length;
    }
  }
}

// All first bytes of the elements, then all second ones, …; what is left over after the last whole element stays.
void split_planes(const char* from, char* to, std::uint64_t nbytes, std::uint64_t width) {
  const std::uint64_t count = nbytes / width;
  for (std::uint64_t plane = 0; plane < width; ++plane)
    for (std::uint64_t n = 0; n < count; ++n) to[plane * count + n] = from[n * width + plane];
  std::memcpy(to + count * width, from + count * width, nbytes - count * width);
}

void join_planes(const char* from, char* to, std::uint64_t nbytes, std::uint64_t width) {
  const std::uint64_t count = nbytes / width;
  for (std::uint64_t plane = 0; plane < width; ++plane)
    for (std::uint64_t n = 0; n < count; ++n) to[n * width + plane] = from[plane * count + n];
  std::memcpy(to + count * width, from + count * width, nbytes - count * width);
}

// With a width known to the compiler, its loops become vector code: a limit must not be that of a slow loop.
template <typename General, typename Two, typename Four, typename Eight>
void by_width(std::uint64_t width, General general, Two two, Four four, Eight eight) {
  if (width == 2)
    two();
  else if (width == 4)
    four();
  else if (width == 8)
    eight();
  else
    general();
}

void split(const char* from, char* to, std::uint64_t nbytes, std::uint64_t width) {
  by_width(width, [=] { split_planes(from, to, nbytes, width); }, [=] { split_planes(from, to, nbytes, 2); },
           [=] { split_planes(from, to, nbytes, 4); }, [=] { split_planes(from, to, nbytes, 8); });
}

void join(const char* from, char* to, std::uint64_t nbytes, std::uint64_t width) {
  by_width(width, [=] { join_planes(from, to, nbytes, width); }, [=] { join_planes(from, to, nbytes, 2); },
           [=] { join_planes(from, to, nbytes, 4); }, [=] { join_planes(from, to, nbytes, 8); });
}

std::uint64_t checked(std::size_t result, const char* doing) {
  if (ZSTD_isError(result) != 0) throw Failure(std::string(doing) + ": " + ZSTD_getErrorName(result));
  return result;
}

}  // namespace

int main(int argc, char** argv) {
  return guarded("zstd_rate", [&] {
    std::uint64_t nbytes = 256 << 20, block = 8 << 20, threads = 1, repeat = 3, shuffle = 1;
    std::int64_t level = 1;
    std::string kind = "bf16-normal";
    Flags flags("zstd_rate",
                "Compresses blocks apart from each other, one context per thread, and decompresses them again.\n"
                "`seconds` and `gib_s_median` are those of compressing; both count uncompressed bytes.");
    flags.size("bytes", &nbytes, 1, 1ULL << 40, "bytes of data; a file may be shorter");
    flags.integer("level", &level, ZSTD_minCLevel(), ZSTD_maxCLevel(), "compression level");
    flags.text("data", &kind, "bf16-normal|random|zeros|file:PATH", "what to compress");
    flags.count("shuffle", &shuffle, 1, 64, "split the elements of this many bytes into byte planes first; 1: no");
    flags.size("block", &block, 1, 1 << 30, "bytes compressed at a time");
    flags.count("threads", &threads, 1, 1024, "threads");
    flags.count("repeat", &repeat, 1, 1000, "times to measure");
    flags.parse(argc, argv);
    if (kind.rfind("file:", 0) == 0)
      nbytes = std::min(nbytes, File(kind.substr(5), O_RDONLY).size());
    else if (kind != "bf16-normal" && kind != "random" && kind != "zeros")
      throw UsageError("--data: \"" + kind + "\" is none of bf16-normal|random|zeros|file:PATH");
    if (nbytes == 0) throw UsageError("--data: the file is empty");

    const std::uint64_t blocks = (nbytes + block - 1) / block, bound = ZSTD_compressBound(block);
    const Memory data(nbytes, Pages::small), packed(blocks * bound, Pages::small), back(nbytes, Pages::small);
    const Memory planes(threads * block, Pages::small);
    fill(data.data(), nbytes, kind, block, threads);
    for (const Memory* memory : {&packed, &back, &planes}) Memory::populate(memory->data(), memory->size());
    std::vector<std::uint64_t> lengths(blocks);
    std::vector<std::unique_ptr<ZSTD_CCtx, FreeCompressor>> compressors;
    std::vector<std::unique_ptr<ZSTD_DCtx, FreeDecompressor>> decompressors;
    for (std::uint64_t t = 0; t < threads; ++t) {
      compressors.emplace_back(ZSTD_createCCtx());
      decompressors.emplace_back(ZSTD_createDCtx());
      if (!compressors.back() || !decompressors.back()) throw std::bad_alloc();
    }

    Repeats compressing, decompressing;
    for (std::uint64_t round = 0; round < repeat; ++round) {
      Queue queue(blocks);
      compressing.time([&] {
        return run_threads(threads, [&](std::uint64_t t) {
          for (std::uint64_t index; queue.take(&index);) {
            const char* from = data.data() + index * block;
            const std::uint64_t length = std::min(block, nbytes - index * block);
            if (shuffle > 1) {
              split(from, planes.data() + t * block, length, shuffle);
              from = planes.data() + t * block;
            }
            lengths[index] = checked(ZSTD_compressCCtx(compressors[t].get(), packed.data() + index * bound, bound, from,
                                                       length, static_cast<int>(level)),
                                     "compress");
          }
        });
      });
      std::memset(back.data(), static_cast<int>(round + 1), nbytes);
      Queue again(blocks);
      decompressing.time([&] {
        return run_threads(threads, [&](std::uint64_t t) {
          for (std::uint64_t index; again.take(&index);) {
            char* to = back.data() + index * block;
            const std::uint64_t length = std::min(block, nbytes - index * block);
            char* into = shuffle > 1 ? planes.data() + t * block : to;
            const std::uint64_t done = checked(
                ZSTD_decompressDCtx(decompressors[t].get(), into, length, packed.data() + index * bound, lengths[index]),
                "decompress");
            if (done != length) throw Failure("block " + std::to_string(index) + " came back with another length");
            if (shuffle > 1) join(into, to, length, shuffle);
          }
        });
      });
      if (std::memcmp(data.data(), back.data(), nbytes) != 0) throw Failure("what came back is not what was compressed");
    }
    std::uint64_t compressed = 0;
    for (std::uint64_t length : lengths) compressed += length;
    Json json = report(flags, nbytes, compressing);
    json.add("compressed_bytes", compressed);
    json.add("ratio", static_cast<double>(nbytes) / static_cast<double>(compressed));
    json.add("decompress_seconds", decompressing.seconds);
    json.add("decompress_gib_s_median", static_cast<double>(nbytes) / gib / median(decompressing.seconds));
    json.add("zstd_version", ZSTD_versionString());
    print(json);
  });
}
