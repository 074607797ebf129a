#include "cli/report/html.h"

#include <fmt/format.h>

namespace ferry::cli {
namespace {

// The colours of pages and pictures.
constexpr std::string_view kColours = R"css(
:root { color-scheme: light dark; --page: #ffffff; --ink: #1f2328; --dim: #656d76; --line: #d8dde3; --panel: #f6f8fa;
  --accent: #b8412c; --bad: #7a2fd0;
  --c0: #bf4b2c; --c1: #2b6cb0; --c2: #2f8757; --c3: #7f58b5; --c4: #a67a12; --c5: #21808f; --c6: #b04a83; --c7: #66717e;
  --c8: #5f7d1f; --c9: #8a5a3c; --c10: #4a56b8; --c11: #a8324a;
  --s0: #e6eaee; --s1: #fdebcb; --s2: #fbd49c; --s3: #f7b56a; --s4: #ee8f4b; --s5: #d96638; --s6: #b23f2b; --s7: #741c20; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171c; --ink: #e3e7ec; --dim: #929ba6; --line: #333a43; --panel: #1c2128; --accent: #f0955a; --bad: #c39bff;
    --c0: #f0955a; --c1: #6cb0f2; --c2: #63c48b; --c3: #b79bea; --c4: #d9b04a; --c5: #5cc0cf; --c6: #e58bbd; --c7: #9aa6b2;
    --c8: #aecb62; --c9: #cfa386; --c10: #939df0; --c11: #f08299;
    --s0: #2a3038; --s1: #46351f; --s2: #664624; --s3: #8e5a29; --s4: #b9702f; --s5: #dd8a3e; --s6: #f4b168; --s7: #fde3b0; } }
.c0 { --c: var(--c0); } .c1 { --c: var(--c1); } .c2 { --c: var(--c2); } .c3 { --c: var(--c3); }
.c4 { --c: var(--c4); } .c5 { --c: var(--c5); } .c6 { --c: var(--c6); } .c7 { --c: var(--c7); }
.c8 { --c: var(--c8); } .c9 { --c: var(--c9); } .c10 { --c: var(--c10); } .c11 { --c: var(--c11); }
svg text { font-size: 12px; fill: var(--ink); }
svg text.layer { text-anchor: end; fill: var(--dim); font-variant-numeric: tabular-nums; }
svg .axis { fill: var(--dim); text-anchor: middle; }
svg .grid { stroke: var(--line); }
svg .curve { fill: none; stroke: var(--c); stroke-width: 1.8; stroke-linejoin: round; }
svg .curve.faint { stroke-width: 1; opacity: 0.35; }
svg .band { fill: var(--c); opacity: 0.2; }
svg .dot { fill: var(--c); }
)css";

constexpr std::string_view kPageStyle = R"css(
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1280px; padding: 28px 32px 64px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 24px; margin: 0 0 12px; }
h2 { font-size: 17px; margin: 40px 0 10px; }
h3 { font-size: 14px; font-weight: 600; margin: 20px 0 6px; }
p, ul { margin: 6px 0; max-width: 900px; }
.dim { color: var(--dim); }
.sides { border-collapse: collapse; }
.sides th { text-align: left; padding: 1px 14px 1px 0; font-weight: 600; }
.sides td { padding: 1px 14px 1px 0; overflow-wrap: anywhere; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin: 20px 0; }
.tile { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 10px 18px 12px; min-width: 170px; }
.tile b { display: block; font-size: 24px; font-weight: 600; line-height: 1.3; }
.tile span { color: var(--dim); font-size: 13px; }
.picker input { position: absolute; opacity: 0; }
.picker label { display: inline-block; padding: 4px 14px; border: 1px solid var(--line); border-radius: 6px; margin-right: 6px; cursor: pointer; }
#pick-share:checked ~ [for=pick-share], #pick-relative:checked ~ [for=pick-relative] { background: var(--ink); color: var(--page); border-color: var(--ink); }
.picker input:focus-visible ~ label { outline: 2px solid var(--accent); outline-offset: 1px; }
.axis-switch { position: fixed; top: 0; opacity: 0; pointer-events: none; }
.axes { display: flex; gap: 6px; align-items: center; margin: 0 0 10px; font-size: 13px; color: var(--dim); }
.axes label { padding: 2px 11px; border: 1px solid var(--line); border-radius: 6px; color: var(--ink); cursor: pointer; }
#axis-steps:checked ~ .axes [for=axis-steps], #axis-time:checked ~ .axes [for=axis-time] { background: var(--ink); color: var(--page); border-color: var(--ink); }
.axis-switch:focus-visible ~ .axes label { outline: 2px solid var(--accent); outline-offset: 1px; }
#axis-steps:checked ~ .charts .over-time, #axis-time:checked ~ .charts .over-steps { display: none; }
.picker .panel { display: none; overflow-x: auto; }
#pick-share:checked ~ #share, #pick-relative:checked ~ #relative { display: block; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 14px; margin: 14px 0 4px; max-width: none; font-size: 13px; color: var(--dim); }
.key { display: inline-flex; align-items: center; gap: 5px; }
.chips { display: flex; flex-wrap: wrap; gap: 8px 22px; font-size: 13px; }
.chip { display: inline-flex; align-items: center; gap: 7px; }
svg .power { font-size: 9px; }
svg .bar { fill: var(--s5); }
svg .bar.equal { fill: var(--dim); opacity: 0.55; }
svg .number { font-size: 10.5px; text-anchor: middle; pointer-events: none; font-variant-numeric: tabular-nums; }
svg .low { fill: var(--ink); } svg .high { fill: var(--page); }
.experts rect:hover, .heat rect:hover { stroke: var(--ink); stroke-width: 2px; }
.s0 { fill: var(--s0); background: var(--s0); } .s1 { fill: var(--s1); background: var(--s1); } .s2 { fill: var(--s2); background: var(--s2); }
.s3 { fill: var(--s3); background: var(--s3); } .s4 { fill: var(--s4); background: var(--s4); } .s5 { fill: var(--s5); background: var(--s5); }
.s6 { fill: var(--s6); background: var(--s6); } .s7 { fill: var(--s7); background: var(--s7); }
.nonfinite { stroke: var(--bad); stroke-width: 2.5px; }
.unpaired { fill: none; stroke: var(--accent); stroke-dasharray: 3 2; stroke-width: 1.5px; pointer-events: all; }
.warning { color: var(--bad); }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(430px, 100%), 1fr)); gap: 16px; }
.charts.small { grid-template-columns: repeat(auto-fill, minmax(min(290px, 100%), 1fr)); }
.charts.small svg text { font-size: 17px; }
svg.timeline { min-width: 860px; }
.chart { margin: 0; padding: 10px 12px 6px; background: var(--panel); border: 1px solid var(--line); border-radius: 8px; }
.chart figcaption { display: flex; flex-wrap: wrap; gap: 2px 16px; align-items: baseline; margin-bottom: 4px; font-size: 13px; }
.chart figcaption b { font-size: 14px; margin-right: auto; overflow-wrap: anywhere; }
.chart figcaption span { color: var(--dim); font-variant-numeric: tabular-nums; }
.chart i { display: inline-block; width: 14px; height: 3px; border-radius: 2px; margin-right: 6px; vertical-align: middle; }
.chart svg, svg.timeline { display: block; width: 100%; height: auto; }
.chart i { background: var(--c); }
svg .column rect { fill: transparent; }
svg .column line { stroke: var(--ink); opacity: 0; }
svg .column:hover line { opacity: 0.45; }
svg .span rect { fill: var(--c); }
svg .span:hover rect { stroke: var(--ink); stroke-width: 1.5px; }
svg .span.frame rect, .block.frame { fill: var(--s0); background: var(--s0); }
.block { display: inline-block; width: 14px; height: 12px; border-radius: 2px; background: var(--c); }
svg .span text { font-size: 11px; fill: var(--page); pointer-events: none; }
svg .span.frame text { fill: var(--dim); }
.parts { border-collapse: collapse; width: 100%; max-width: 900px; font-size: 13px; font-variant-numeric: tabular-nums; }
.parts th { text-align: left; font-weight: 600; padding: 3px 14px 3px 0; white-space: nowrap; width: 1%; }
.parts td { padding: 3px 0 3px 10px; text-align: right; white-space: nowrap; width: 1%; }
.parts td:nth-child(2) { width: auto; }
.parts svg { display: block; width: 100%; height: 12px; }
.parts svg rect { fill: var(--c); } .parts svg .rail { fill: var(--s0); }
.pad { padding: 10px 12px; background: var(--panel); }
.scroll { overflow: auto; max-height: 85vh; border: 1px solid var(--line); border-radius: 8px; }
.numbers { border-collapse: separate; border-spacing: 0; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
.numbers th, .numbers td { padding: 3px 10px; text-align: right; white-space: nowrap; }
.numbers th:first-child, .numbers td:first-child, .numbers td:last-child { text-align: left; }
.numbers.metrics td:last-child { text-align: right; }
.numbers thead th { position: sticky; top: 0; background: var(--panel); border-bottom: 1px solid var(--line); font-weight: 600; }
.numbers .layer td { border-top: 1px solid var(--line); background: var(--panel); font-weight: 600; }
.numbers .same td { color: var(--dim); }
.swatch { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 7px; }
code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 0.93em; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
summary { cursor: pointer; }
.browser > input, .steps > input { position: absolute; opacity: 0; }
.browser > label, .steps > label { display: inline-block; padding: 2px 11px; margin: 0 6px 6px 0; border: 1px solid var(--line); border-radius: 6px;
  font-size: 13px; cursor: pointer; font-variant-numeric: tabular-nums; }
.browser > input:checked + label, .steps > input:checked + label { background: var(--ink); color: var(--page); border-color: var(--ink); }
.browser > input:focus-visible + label, .steps > input:focus-visible + label { outline: 2px solid var(--accent); outline-offset: 1px; }
.browser .what { display: inline-block; min-width: 52px; font-size: 13px; color: var(--dim); }
.steps { display: flex; flex-wrap: wrap; align-items: baseline; }
.steps > .step { display: none; order: 1; width: 100%; }
.steps > input:checked + label + .step { display: block; }
.samples { display: flex; flex-direction: column; border: 1px solid var(--line); border-radius: 8px; overflow: hidden; background: var(--line); gap: 1px; }
.browser > .worst:checked ~ .steps .samples { flex-direction: column-reverse; }
.browser > .logged:checked ~ .steps .sample { order: var(--row); }
.sample { background: var(--page); }
.sample summary { display: flex; gap: 12px; align-items: baseline; padding: 5px 12px; list-style: none; font-size: 13px; }
.sample summary::-webkit-details-marker { display: none; }
.sample summary:hover, .sample[open] summary { background: var(--panel); }
.sample summary span { flex: 1 1 50%; min-width: 0; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.sample summary .score { flex: 0 0 62px; padding: 0 8px; border-radius: 10px; text-align: center; font-weight: 600; color: var(--page); background: var(--c);
  font-variant-numeric: tabular-nums; }
.texts { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 2px 16px; margin: 0; padding: 8px 12px 12px; }
.texts dt { color: var(--dim); font-size: 13px; }
.texts dd { margin: 0; }
.texts pre { margin: 0; max-height: 420px; overflow-y: auto; }
.turns { margin: 0; padding: 0; list-style: none; display: flex; flex-direction: column; gap: 6px; }
.turns li { border-left: 3px solid var(--line); padding-left: 10px; }
.turns .model { border-color: var(--accent); }
.turns .other { margin-left: 24px; }
.texts .cut { color: var(--accent); font-style: italic; }
@media print { .scroll { max-height: none; } }
)css";

}  // namespace

std::string html_page(std::string_view title, std::string_view body) {
  return fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\" xmlns=\"http://www.w3.org/1999/xhtml\">\n<head>\n"
      "<meta charset=\"utf-8\"/>\n{}\n<meta name=\"viewport\" content=\"width=device-width, "
      "initial-scale=1\"/>\n<title>{}</title>\n<style>{}{}</style>\n</head>\n<body>\n{}</body>\n</"
      "html>\n",
      kPageMark, escape_xml(title), kColours, kPageStyle, body);
}

std::string svg_file(int width, int height, std::string_view title, std::string_view body) {
  return fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" "
      "height=\"{1}\" role=\"img\" font-family=\"system-ui, -apple-system, 'Segoe UI', Roboto, "
      "'DejaVu Sans', sans-serif\">\n<title>{2}</title>{5}\n<style>{3}</style>\n<rect "
      "width=\"{0}\" height=\"{1}\" rx=\"8\" fill=\"var(--page)\"/>\n{4}</svg>\n",
      width, height, escape_xml(title), kColours, body, kPictureMark);
}

std::string tile(std::string_view value, std::string_view what) {
  return fmt::format("<div class=\"tile\"><b>{}</b><span>{}</span></div>\n", escape_xml(value),
                     escape_xml(what));
}

std::string escape_xml(std::string_view text) {
  std::string escaped;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    // XML has no U+FFFE and U+FFFF.
    if (const auto three = text.substr(i, 3); three == "\xEF\xBF\xBE" || three == "\xEF\xBF\xBF") {
      escaped += '?';
      i += 2;
      continue;
    }
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      case '"':
        escaped += "&quot;";
        break;
      default:
        // XML knows no other control characters, however they are written.
        escaped += static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t' ? '?' : c;
    }
  }
  return escaped;
}

}  // namespace ferry::cli
