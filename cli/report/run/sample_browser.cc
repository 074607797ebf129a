#include "cli/report/run/sample_browser.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <numeric>
#include <utility>

#include "cli/report/chart.h"
#include "cli/report/html.h"
#include "cli/report/run/trajectory.h"
#include "cli/report/text.h"

namespace ferry::cli {
namespace {

namespace fs = std::filesystem;
using trainer::LoggedSample;

constexpr auto kTurns = "turns";  // a member of a sample, which trajectory.h reads
constexpr std::size_t kMostSteps = 21;
constexpr std::size_t kMostSamples = 20;
constexpr std::size_t kMostBytes = 3000;     // of a text
constexpr std::size_t kLineBytes = 80;       // of the line that stands for it
constexpr std::size_t kMostScoresNamed = 6;  // with how many have each

// At most `most` of `count` numbers from 0, evenly, the first and the last among them.
std::vector<std::size_t> spread(std::size_t count, std::size_t most) {
  std::vector<std::size_t> chosen(std::min(count, most));
  for (std::size_t i = 0; i < chosen.size(); ++i)
    chosen[i] = chosen.size() < 2 ? 0 : i * (count - 1) / (chosen.size() - 1);
  return chosen;
}

// Chooses the samples that are shown: about as many of each score, best first.
std::vector<std::size_t> choose(const std::vector<LoggedSample>& samples) {
  std::map<double, std::vector<std::size_t>, std::greater<>> by_score;
  for (std::size_t i = 0; i < samples.size(); ++i)  // those without a score last
    by_score[std::isfinite(samples[i].score) ? samples[i].score : -HUGE_VAL].push_back(i);
  std::vector<std::vector<std::size_t>> groups;
  for (auto& [score, group] : by_score) groups.push_back(std::move(group));

  std::vector<std::size_t> counts(groups.size());  // taken of each
  if (groups.size() >= kMostSamples) {
    for (const auto i : spread(groups.size(), kMostSamples)) counts[i] = 1;
  } else {
    auto left = std::min(samples.size(), kMostSamples);
    for (std::size_t i = 0; left > 0; i = (i + 1) % groups.size()) {
      if (counts[i] == groups[i].size()) continue;
      ++counts[i];
      --left;
    }
  }
  std::vector<std::size_t> chosen;
  for (std::size_t i = 0; i < groups.size(); ++i)
    chosen.insert(chosen.end(), groups[i].begin(),
                  groups[i].begin() + static_cast<std::ptrdiff_t>(counts[i]));
  return chosen;
}

ShownStep shown_step(std::int64_t step,
                     std::vector<LoggedSample> samples,
                     const std::vector<nlohmann::json>& exchanges) {
  ShownStep shown{.step = step, .num_samples = static_cast<std::int64_t>(samples.size())};
  for (const auto& sample : samples) {
    if (std::isfinite(sample.score)) shown.scores.push_back(sample.score);
  }
  std::ranges::sort(shown.scores);
  shown.rows = choose(samples);
  for (const auto row : shown.rows) {
    shown.samples.push_back(std::move(samples[row]));
    shown.exchanges.push_back(exchanges.empty() ? nlohmann::json() : exchanges[row]);
  }
  return shown;
}

// Not within a code point of UTF-8.
std::size_t boundary(std::string_view text, std::size_t at) {
  while (at > 0 && at < text.size() && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) --at;
  return at;
}

// A whole text, or its two ends.
std::string text_html(std::string_view text) {
  if (text.size() <= kMostBytes) return fmt::format("<pre>{}</pre>", escape_xml(text));
  const auto head = boundary(text, kMostBytes / 2);
  const auto tail = boundary(text, text.size() - kMostBytes / 2);
  return fmt::format("<pre>{}\n<span class=\"cut\">{} bytes are left out here</span>\n{}</pre>",
                     escape_xml(text.substr(0, head)),
                     format_count(static_cast<std::int64_t>(tail - head)),
                     escape_xml(text.substr(tail)));
}

// The end of a text in one line: there is the question of a prompt, and the answer of a response.
std::string line_html(std::string_view text) {
  while (!text.empty() && static_cast<unsigned char>(text.back()) <= ' ') text.remove_suffix(1);
  const bool is_cut = text.size() > kLineBytes;
  if (is_cut) text.remove_prefix(boundary(text, text.size() - kLineBytes));
  std::string line(text);
  std::ranges::replace_if(
      line, [](unsigned char c) { return c < ' '; }, ' ');
  return fmt::format("{}{}", is_cut ? "…" : "", escape_xml(line));
}

std::string value_text(const nlohmann::json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_number_float()) return fmt::format("{:.6g}", value.get<double>());
  return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// The range of a whole set's scores: low ones are red, high ones green.
struct Range {
  double least = HUGE_VAL;
  double most = -HUGE_VAL;
};

std::string score_html(double score, const Range& range) {
  if (!std::isfinite(score)) return "<span class=\"score c7\">none</span>";
  const auto share =
      range.most > range.least ? (score - range.least) / (range.most - range.least) : 0.5;
  return fmt::format("<span class=\"score {}\">{}</span>",
                     share < 1.0 / 3   ? "c0"
                     : share < 2.0 / 3 ? "c4"
                                       : "c2",
                     short_number(score));
}

// An answer, or its turns.
std::string answer_html(const LoggedSample& sample, const nlohmann::json& exchanges) {
  const auto found = sample.extra.find(kTurns);
  const auto turns = found == sample.extra.end() ? nlohmann::json() : found->second;
  if (exchanges.empty() && turns.empty()) return text_html(sample.output);
  std::string html = "<ol class=\"turns\">\n";
  for (const auto& turn : turns_of(sample.output, exchanges, turns))
    html += fmt::format("<li class=\"{}\"><b>{}</b> <span class=\"dim\">{}</span>{}</li>\n",
                        turn.who == "model" ? "model" : "other", escape_xml(turn.who),
                        escape_xml(turn.note), turn.text.empty() ? "" : text_html(turn.text));
  return html + "</ol>";
}

std::string sample_html(const LoggedSample& sample,
                        const nlohmann::json& exchanges,
                        std::size_t row,
                        const Range& range) {
  auto html = fmt::format(
      "<details class=\"sample\" style=\"--row: {}\"><summary>{}<span class=\"dim\">{}</span>"
      "<span>{}</span></summary>\n<dl class=\"texts\"><dt>prompt</dt><dd>{}</dd>\n<dt>answer</dt>"
      "<dd>{}</dd>\n",
      row, score_html(sample.score, range), line_html(sample.input), line_html(sample.output),
      text_html(sample.input), answer_html(sample, exchanges));
  if (!sample.gts.is_null())
    html += fmt::format("<dt>ground truth</dt><dd>{}</dd>\n", text_html(value_text(sample.gts)));
  for (const auto& [name, value] : sample.extra) {
    if (!value.is_null() && name != kTurns)
      html +=
          fmt::format("<dt>{}</dt><dd>{}</dd>\n", escape_xml(name), text_html(value_text(value)));
  }
  return html + "</dl></details>\n";
}

// "1 × 230, 0 × 26", or "from 0.1 to 0.9".
std::string scores_text(const std::vector<double>& scores) {
  if (scores.empty()) return "without a score";
  const auto mean =
      std::accumulate(scores.begin(), scores.end(), 0.0) / static_cast<double>(scores.size());
  std::map<double, std::int64_t, std::greater<>> counts;
  for (const auto score : scores) ++counts[score];
  auto text = fmt::format("mean score {}", short_number(mean));
  if (counts.size() > kMostScoresNamed)
    return text + fmt::format(", from {} to {}", short_number(scores.front()),
                              short_number(scores.back()));
  const char* separator = ": ";
  for (const auto& [score, count] : counts) {
    text += fmt::format("{}{} × {}", separator, format_count(count), short_number(score));
    separator = ", ";
  }
  return text;
}

std::string step_html(const std::string& name,
                      const ShownStep& step,
                      bool is_picked,
                      const Range& range) {
  const auto all = static_cast<std::size_t>(step.num_samples);
  auto html = fmt::format(
      "<input type=\"radio\" name=\"{0}-step\" id=\"{0}-step-{1}\"{2}/><label "
      "for=\"{0}-step-{1}\">{1}</label>\n<div class=\"step\"><p class=\"dim\">Step {1}: {3} "
      "answers, {4}{5}</p>\n<div class=\"samples\">\n",
      name, step.step, is_picked ? " checked=\"checked\"" : "", format_count(step.num_samples),
      scores_text(step.scores),
      all > step.samples.size()
          ? fmt::format(". {} of them are shown, of each score about as many.", step.samples.size())
          : ".");
  for (std::size_t i = 0; i < step.samples.size(); ++i)
    html += sample_html(step.samples[i], step.exchanges[i], step.rows[i], range);
  return html + "</div></div>\n";
}

std::string left_out(const SampleSet& set) {
  auto html =
      fmt::format("<p class=\"dim\">Every answer of {} stands in <code>{}</code>",
                  set.num_steps == 1 ? "its step" : "every step", escape_xml(set.folder.string()));
  if (static_cast<std::size_t>(set.num_steps) > set.steps.size())
    html += fmt::format("; {} of {} steps are here", set.steps.size(), format_count(set.num_steps));
  if (set.num_unreadable > 0)
    html += fmt::format("; {} lines are no answers", format_count(set.num_unreadable));
  return html + ".</p>\n";
}

}  // namespace

SampleSet read_sample_set(const fs::path& folder,
                          std::optional<std::int64_t> step,
                          const fs::path& sessions) {
  const auto files = trainer::sample_files(folder);
  SampleSet set{.folder = folder, .num_steps = static_cast<std::int64_t>(files.size())};
  std::vector<std::int64_t> steps;
  for (const auto& [number, path] : files) steps.push_back(number);
  std::map<std::int64_t, fs::path> chosen;
  for (const auto i : spread(steps.size(), kMostSteps)) chosen.insert(*files.find(steps[i]));
  if (step && files.contains(*step)) chosen.insert(*files.find(*step));
  for (const auto& [number, path] : chosen) {
    auto read = trainer::read_samples(path);
    set.num_unreadable += read.num_unreadable;
    const auto exchanges = read_exchanges(sessions, number, read.samples.size());
    set.steps.push_back(shown_step(number, std::move(read.samples), exchanges));
  }
  return set;
}

std::string sample_browser(const std::string& name, const SampleSet& set) {
  if (set.steps.empty()) return {};
  Range range;
  for (const auto& step : set.steps) {
    if (step.scores.empty()) continue;
    range.least = std::min(range.least, step.scores.front());
    range.most = std::max(range.most, step.scores.back());
  }
  auto html = fmt::format("<h2>{}</h2>\n<div class=\"browser\"><span class=\"what\">order</span>\n",
                          escape_xml(name));
  std::string id = name;
  std::ranges::replace_if(
      id, [](unsigned char c) { return !std::isalnum(c); }, '-');
  for (const auto& [order, label] :
       {std::pair("best", "best first"), {"worst", "worst first"}, {"logged", "as logged"}}) {
    html += fmt::format(
        "<input type=\"radio\" name=\"{0}-order\" id=\"{0}-{1}\" class=\"{1}\"{2}/><label "
        "for=\"{0}-{1}\">{3}</label>\n",
        id, order, order == std::string_view("best") ? " checked=\"checked\"" : "", label);
  }
  html += "<div class=\"steps\"><span class=\"what\">step</span>\n";
  for (const auto& step : set.steps) html += step_html(id, step, &step == &set.steps.back(), range);
  return html + "</div></div>\n" + left_out(set);
}

}  // namespace ferry::cli
