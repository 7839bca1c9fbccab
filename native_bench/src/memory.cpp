// Mappings, and what the kernel says about them: see memory.hpp.
#include "memory.hpp"

#include <cstdio>

#include "errors.hpp"

namespace native {

namespace {

// What /proc/meminfo says in a line like "MemAvailable:  22 kB", in bytes; 0 if it does not.
std::uint64_t meminfo(const char* field) {
  std::FILE* file = std::fopen("/proc/meminfo", "re");
  if (file == nullptr) return 0;
  char line[256], name[128];
  unsigned long long kib = 0;
  std::uint64_t found = 0;
  while (std::fgets(line, sizeof line, file) != nullptr)
    if (std::sscanf(line, "%127[^:]: %llu", name, &kib) == 2 && std::string(name) == field) found = kib * 1024;
  std::fclose(file);
  return found;
}

}  // namespace

Memory::Memory(std::uint64_t nbytes, Pages pages) : nbytes_(nbytes) {
  // The kernel would grant the mapping and kill the process later.
  const std::uint64_t available = meminfo("MemAvailable");
  if (available != 0 && nbytes > available)
    throw Unavailable(std::to_string(nbytes >> 20) + " MiB of memory are needed, " +
                      std::to_string(available >> 20) + " MiB are available");
  mapped_ = round_up(nbytes, huge_page_size) + huge_page_size;
  base_ = ::mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base_ == MAP_FAILED) {
    base_ = nullptr;
    throw_errno("mmap of " + std::to_string(nbytes) + " bytes");
  }
  data_ = reinterpret_cast<char*>(round_up(reinterpret_cast<std::uintptr_t>(base_), huge_page_size));
  // EINVAL from a kernel without transparent huge pages: then all pages are small, as `huge_bytes` shows.
  ::madvise(base_, mapped_, pages == Pages::huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
}

void Memory::populate(char* data, std::uint64_t nbytes) {
  for (std::uint64_t at = 0; at < nbytes; at += page_size) static_cast<volatile char*>(data)[at] = 0;
}

std::uint64_t Memory::huge_bytes() const {
  std::FILE* file = std::fopen("/proc/self/smaps", "re");
  if (file == nullptr) return 0;
  const auto first = reinterpret_cast<std::uintptr_t>(base_);
  char line[512];
  unsigned long begin = 0, end = 0;
  unsigned long long kib = 0;
  std::uint64_t found = 0;
  bool inside = false;
  while (std::fgets(line, sizeof line, file) != nullptr) {
    if (std::sscanf(line, "%lx-%lx ", &begin, &end) == 2)
      inside = begin < first + mapped_ && end > first;
    else if (inside && std::sscanf(line, "AnonHugePages: %llu kB", &kib) == 1)
      found += kib * 1024;
  }
  std::fclose(file);
  return found < nbytes_ ? found : nbytes_;
}

}  // namespace native
