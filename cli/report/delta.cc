#include "cli/report/delta.h"

#include <fmt/format.h>

#include <algorithm>

#include "cli/report/text.h"
#include "distckpt/base/printable.h"

namespace ferry::cli {
namespace {

double times_smaller(std::int64_t model_bytes, std::int64_t stored_bytes) {
  return static_cast<double>(model_bytes) /
         static_cast<double>(std::max<std::int64_t>(stored_bytes, 1));
}

std::string share(std::int64_t part, std::int64_t all) {
  return fmt::format("{:.3g} %", 100.0 * static_cast<double>(part) /
                                     static_cast<double>(std::max<std::int64_t>(all, 1)));
}

// "version 3 of version 2, xor", or the digests of both ends.
std::string ends_text(const converter::DeltaSummary& summary) {
  if (summary.form == converter::DeltaForm::kSlime) {
    return fmt::format("form     slime, {}\nbase     version {}\nresult   version {}\n",
                       printable(summary.encoding), summary.base_version, summary.version);
  }
  return fmt::format("form     ferry\nbase     model {}\nresult   model {}\n", summary.base_digest,
                     summary.result_digest);
}

}  // namespace

std::string make_delta_text(const converter::MakeDeltaReport& report) {
  auto text =
      fmt::format("base     {}, model {}\n", printable(report.base.string()), report.base_digest);
  text += fmt::format("result   {}, model {}\n", printable(report.result.string()),
                      report.result_digest);
  text += fmt::format("changed  {} of {} elements ({}), {} of {} tensors\n",
                      format_count(report.num_changed), format_count(report.num_elements),
                      share(report.num_changed, report.num_elements), report.num_changed_tensors,
                      report.num_tensors);
  for (const auto& name : report.files) text += fmt::format("file     {}\n", printable(name));
  for (const auto& note : report.notes) text += fmt::format("note     {}\n", printable(note));
  const auto both = static_cast<double>(2 * report.model_bytes);
  text += fmt::format("delta    {}, {}, {:.3g} times smaller than the model\n",
                      printable(report.target.string()), format_bytes(report.stored_bytes),
                      times_smaller(report.model_bytes, report.stored_bytes));
  text +=
      fmt::format("made     in {} ({}/s of both ends)\n", format_seconds(report.seconds),
                  format_bytes(static_cast<std::int64_t>(both / std::max(report.seconds, 1e-3))));
  return text;
}

std::string delta_text(const converter::DeltaSummary& summary, bool tensors) {
  auto text = fmt::format("delta    {}\n", printable(summary.path.string())) + ends_text(summary);
  if (summary.form == converter::DeltaForm::kSlime) {
    text += fmt::format("changed  {} tensors\nsize     {}\n", summary.tensors.size(),
                        format_bytes(summary.stored_bytes));
  } else {
    std::int64_t changed = 0;
    for (const auto& tensor : summary.tensors) changed += tensor.num_changed.value_or(0);
    text += fmt::format("changed  {} elements, {} of {} tensors\n", format_count(changed),
                        summary.tensors.size(), summary.num_tensors);
    for (const auto& name : summary.files) text += fmt::format("file     {}\n", printable(name));
    text += fmt::format("size     {}, {:.3g} times smaller than the model\n",
                        format_bytes(summary.stored_bytes),
                        times_smaller(summary.model_bytes, summary.stored_bytes));
  }
  if (!tensors) return text;
  for (const auto& tensor : summary.tensors) {
    text += fmt::format(
        "tensor   {}  {}{}\n", printable(tensor.name), format_bytes(tensor.stored_bytes),
        tensor.num_changed ? fmt::format(", {} elements", format_count(*tensor.num_changed)) : "");
  }
  return text;
}

}  // namespace ferry::cli
