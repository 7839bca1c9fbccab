// The flags' parser: see flags.hpp.
#include "flags.hpp"

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "errors.hpp"

namespace native {

namespace {

std::uint64_t parse_size(std::string_view flag, std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  std::string_view unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
  unsigned shift = 0;
  if (!unit.empty()) {
    const auto at = std::string_view("KMGT").find(unit[0]);
    const std::string_view rest = unit.substr(1);
    const bool known = at != std::string_view::npos && (rest.empty() || rest == "iB");
    if (known) shift = static_cast<unsigned>(10 * (at + 1));
    if (!known && unit != "B") shift = 64;
  }
  if (error != std::errc() || shift == 64 || (shift != 0 && value >> (64 - shift) != 0))
    throw UsageError(std::string(flag) + ": \"" + std::string(text) + "\" is no size; write 4096, 256K, 8M or 2GiB");
  return value << shift;
}

std::uint64_t ranged(const std::string& flag, std::uint64_t value, std::uint64_t least, std::uint64_t most) {
  if (value < least || value > most)
    throw UsageError(flag + ": " + std::to_string(value) + " is not from " + std::to_string(least) + " to " +
                     std::to_string(most));
  return value;
}

[[noreturn]] void finish(const std::string& text) {
  std::fputs(text.c_str(), stdout);
  std::exit(std::fflush(stdout) == 0 ? 0 : exit_failed);
}

}  // namespace

void Flags::size(const char* name, std::uint64_t* value, std::uint64_t least, std::uint64_t most, const char* help) {
  const std::string flag = std::string("--") + name;
  add(name, "SIZE", help, std::to_string(*value),
      [=](const std::string& text) { *value = ranged(flag, parse_size(flag, text), least, most); },
      [=](Json& json) { json.add(name, *value); });
}

void Flags::count(const char* name, std::uint64_t* value, std::uint64_t least, std::uint64_t most, const char* help) {
  const std::string flag = std::string("--") + name;
  add(name, "N", help, std::to_string(*value),
      [=](const std::string& text) {
        std::uint64_t parsed = 0;
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), parsed);
        if (error != std::errc() || end != text.data() + text.size())
          throw UsageError(flag + ": \"" + text + "\" is no whole number");
        *value = ranged(flag, parsed, least, most);
      },
      [=](Json& json) { json.add(name, *value); });
}

void Flags::integer(const char* name, std::int64_t* value, std::int64_t least, std::int64_t most, const char* help) {
  const std::string flag = std::string("--") + name;
  add(name, "N", help, std::to_string(*value),
      [=](const std::string& text) {
        std::int64_t parsed = 0;
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), parsed);
        if (error != std::errc() || end != text.data() + text.size() || parsed < least || parsed > most)
          throw UsageError(flag + ": \"" + text + "\" is no whole number from " + std::to_string(least) + " to " +
                           std::to_string(most));
        *value = parsed;
      },
      [=](Json& json) { json.add(name, *value); });
}

void Flags::choice(const char* name, std::string* value, std::vector<std::string> choices, const char* help) {
  std::string all;
  for (const std::string& one : choices) all += (all.empty() ? "" : "|") + one;
  const std::string flag = std::string("--") + name;
  add(name, all, help, *value,
      [=](const std::string& text) {
        for (const std::string& one : choices)
          if (one == text) {
            *value = text;
            return;
          }
        throw UsageError(flag + ": \"" + text + "\" is none of " + all);
      },
      [=](Json& json) { json.add(name, *value); });
}

void Flags::text(const char* name, std::string* value, const char* metavar, const char* help) {
  add(name, metavar, help, *value, [=](const std::string& text) { *value = text; },
      [=](Json& json) { json.add(name, *value); });
}

void Flags::on_off(const char* name, bool* value, const char* help) {
  const std::string flag = std::string("--") + name;
  add(name, "on|off", help, *value ? "on" : "off",
      [=](const std::string& text) {
        if (text != "on" && text != "off") throw UsageError(flag + ": \"" + text + "\" is neither on nor off");
        *value = text == "on";
      },
      [=](Json& json) { json.add(name, *value); });
}

void Flags::positional(const char* metavar, std::vector<std::string>* values, const char* help) {
  metavar_ = metavar;
  positional_help_ = help;
  positional_ = values;
}

void Flags::parse(int argc, char** argv) {
  bool only_positional = false;
  for (int i = 1; i < argc; ++i) {
    std::string argument = argv[i];
    if (only_positional || argument.size() < 2 || argument[0] != '-') {
      if (positional_ == nullptr) throw UsageError("\"" + argument + "\" is no flag");
      positional_->push_back(argument);
      continue;
    }
    if (argument == "--") {
      only_positional = true;
      continue;
    }
    if (argument == "--help" || argument == "-h") finish(help());
    if (argument == "--version") finish(program_ + " " NATIVE_BENCH_VERSION "\n");
    const auto equals = argument.find('=');
    const std::string name = argument.substr(0, equals);
    const Flag* flag = find(name);
    if (flag == nullptr) throw UsageError(name + " is unknown; --help lists the flags");
    if (equals != std::string::npos) {
      flag->set(argument.substr(equals + 1));
    } else {
      if (i + 1 == argc) throw UsageError(name + " needs a value: " + flag->metavar);
      flag->set(argv[++i]);
    }
  }
}

Json Flags::json() const {
  Json json;
  for (const Flag& flag : flags_) flag.show(json);
  if (positional_ != nullptr) json.add("paths", *positional_);
  return json;
}

void Flags::add(const char* name, std::string metavar, const char* help, std::string initial,
         std::function<void(const std::string&)> set, std::function<void(Json&)> show) {
  flags_.push_back({std::string("--") + name, std::move(metavar), help, std::move(initial), std::move(set),
                    std::move(show)});
}

const Flags::Flag* Flags::find(const std::string& name) const {
  for (const Flag& flag : flags_)
    if (flag.name == name) return &flag;
  return nullptr;
}

std::string Flags::help() const {
  std::string text = "usage: " + program_ + " [flags]";
  if (positional_ != nullptr) text += " [" + metavar_ + " ...]";
  text += "\n\n" + about_ + "\n\n";
  if (positional_ != nullptr) text += "  " + metavar_ + "\n      " + positional_help_ + "\n";
  for (const Flag& flag : flags_) {
    text += "  " + flag.name + " " + flag.metavar + "\n      " + flag.help;
    text += flag.initial.empty() ? "\n" : " (default: " + flag.initial + ")\n";
  }
  return text + "  --help, --version\n\nThe result is one JSON object on stdout. Exit codes: 0 good, 1 failed or "
                "wrong, 2 usage,\n3 this machine or this build does not have what was asked for.\n";
}

}  // namespace native
