// The pattern, block by block: see pattern.hpp.
#include "pattern.hpp"

#include <algorithm>
#include <cstring>

#include "measure.hpp"

namespace native {

void fill_pattern(char* data, std::uint64_t nbytes, std::uint64_t seed, std::uint64_t offset) {
  for (std::uint64_t at = 0; at < nbytes; at += 8) {
    const std::uint64_t word = pattern_word(seed, (offset + at) / 8);
    std::memcpy(data + at, &word, std::min<std::uint64_t>(8, nbytes - at));
  }
}

void fill_pattern_parallel(char* data, std::uint64_t nbytes, std::uint64_t seed, std::uint64_t threads) {
  constexpr std::uint64_t step = 4 << 20;
  Queue queue((nbytes + step - 1) / step);
  run_threads(threads, [&](std::uint64_t) {
    for (std::uint64_t index; queue.take(&index);) {
      const std::uint64_t at = index * step;
      fill_pattern(data + at, std::min(step, nbytes - at), seed, at);
    }
  });
}

std::uint64_t sample_place(std::uint64_t n, std::uint64_t count, std::uint64_t nbytes, std::uint64_t length) {
  if (nbytes <= length || n == 0) return 0;
  if (n + 1 == count) return nbytes - length;
  return pattern_word(count, n) % (nbytes - length);
}

}  // namespace native
