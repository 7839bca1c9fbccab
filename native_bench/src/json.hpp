// JSON, as far as the programs write it: one object, fields in the order they are added.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

namespace native {

class Json {
 public:
  void add(std::string_view name, std::string_view value) { raw(name, quoted(value)); }
  void add(std::string_view name, const char* value) { raw(name, quoted(value)); }
  void add(std::string_view name, bool value) { raw(name, value ? "true" : "false"); }
  void add(std::string_view name, double value) { raw(name, number(value)); }
  void add(std::string_view name, std::uint64_t value) { raw(name, std::to_string(value)); }
  void add(std::string_view name, std::int64_t value) { raw(name, std::to_string(value)); }
  void add(std::string_view name, const Json& value) { raw(name, value.text()); }

  void add(std::string_view name, const std::vector<double>& values) {
    std::vector<std::string> items;
    for (double value : values) items.push_back(number(value));
    raw(name, list(items));
  }

  void add(std::string_view name, const std::vector<std::string>& values) {
    std::vector<std::string> items;
    for (const std::string& value : values) items.push_back(quoted(value));
    raw(name, list(items));
  }

  std::string text() const { return "{" + body_ + "}"; }

 private:
  void raw(std::string_view name, const std::string& value) {
    if (!body_.empty()) body_ += ", ";
    body_ += quoted(name) + ": " + value;
  }

  static std::string list(const std::vector<std::string>& items) {
    std::string text = "[";
    for (const std::string& item : items) text += (text.size() > 1 ? ", " : "") + item;
    return text + "]";
  }

  static std::string number(double value) {
    if (!std::isfinite(value)) return "null";
    char text[32];
    std::snprintf(text, sizeof text, "%.9g", value);
    return text;
  }

  static std::string quoted(std::string_view value) {
    std::string text = "\"";
    for (char c : value) {
      if (c == '"' || c == '\\') {
        text += '\\';
        text += c;
      } else if (static_cast<unsigned char>(c) < 0x20) {
        char escape[8];
        std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(c));
        text += escape;
      } else {
        text += c;
      }
    }
    return text + "\"";
  }

  std::string body_;
};

}  // namespace native
