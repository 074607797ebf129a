// TensorBoard's event files: records of TFRecord around messages of protobuf, written by hand
// (docs/formats/events.md; tensorflow/core/lib/io/record_writer.h, core/util/event.proto,
// core/framework/summary.proto).
#include <fmt/format.h>
#include <unistd.h>

#include <bit>
#include <cstring>
#include <string>
#include <string_view>

#include "trainer/metrics/append_file.h"
#include "trainer/metrics/metric_log.h"
#include "trainer/metrics/performance.h"

namespace ferry::trainer {
namespace {

std::uint32_t crc32c(std::string_view bytes) {
  std::uint32_t crc = ~0U;
  for (const char byte : bytes) {
    crc ^= static_cast<unsigned char>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) * 0x82f63b78U);
  }
  return ~crc;
}

// CRC-32C, rotated and shifted, so that the CRC of data that holds CRCs stays a good one.
std::uint32_t masked_crc(std::string_view bytes) {
  const auto crc = crc32c(bytes);
  return std::rotr(crc, 15) + 0xa282ead8U;
}

template <typename T>
std::string little_endian(T value) {
  static_assert(std::endian::native == std::endian::little);
  std::string bytes(sizeof value, '\0');
  std::memcpy(bytes.data(), &value, sizeof value);
  return bytes;
}

std::string record(const std::string& message) {
  const auto length = little_endian(static_cast<std::uint64_t>(message.size()));
  return length + little_endian(masked_crc(length)) + message + little_endian(masked_crc(message));
}

// Fields of a message. A tag is the number of the field and the wire type: 0 a varint, 1 eight
// bytes, 2 a length and as many bytes, 5 four bytes.
std::string varint(std::uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes += static_cast<char>(value | 0x80);
  return bytes += static_cast<char>(value);
}
std::string tag(int field, int wire_type) {
  return varint(static_cast<std::uint64_t>(field << 3 | wire_type));
}
std::string number(int field, std::int64_t value) {
  return tag(field, 0) + varint(static_cast<std::uint64_t>(value));
}
std::string text(int field, std::string_view bytes) {
  return tag(field, 2) + varint(bytes.size()) + std::string(bytes);
}

// An Event: wall_time 1, step 2, and one of file_version 3, summary 5, session_log 7.
std::string event(double time, std::int64_t step, const std::string& what) {
  return record(tag(1, 1) + little_endian(time) + number(2, step) + what);
}

// A Summary: values 1, each a tag 1 and a simple_value 2.
std::string summary(const Metrics& metrics) {
  std::string values;
  for (const auto& [name, value] : metrics)
    values += text(1, text(1, name) + tag(2, 5) + little_endian(static_cast<float>(value)));
  return text(5, values);
}

constexpr std::int64_t kSessionStart = 1;  // SessionLog.status 1: START

class EventLog : public MetricLog {
 public:
  EventLog(const std::filesystem::path& path, std::int64_t first_step) : file_(path) {
    const auto now = wall_time();
    file_.append(event(now, 0, text(3, "brain.Event:2")));
    if (first_step > 1) file_.append(event(now, first_step, text(7, number(1, kSessionStart))));
  }
  void write(const StepMetrics& step) override {
    file_.append(event(step.time, step.step, summary(step.values)));
  }

 private:
  AppendFile file_;
};

}  // namespace

std::unique_ptr<MetricLog> open_event_log(const std::filesystem::path& folder,
                                          std::int64_t first_step) {
  const auto name = fmt::format("events.out.tfevents.{:.6f}.{}.{}", wall_time(), host_name(),
                                getpid());  // TensorBoard reads the files of a folder by name
  return std::make_unique<EventLog>(folder / name, first_step);
}

}  // namespace ferry::trainer
