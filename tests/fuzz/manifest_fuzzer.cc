#include <string>

#include "converter/manifest.h"
#include "tests/fuzz/property.h"
#include "tests/fuzz/targets.h"

namespace ferry::fuzz {

// A manifest that is taken is written as one that says the same.
void manifest(std::string_view input) {
  converter::Manifest parsed;
  if (!accepts([&] { parsed = converter::parse_manifest(input, "fuzz"); })) return;
  const auto written = converter::write_manifest(parsed);
  const auto again = converter::parse_manifest(written, "written");
  expect(compare_manifests(parsed, again, true).empty(), "differs once written: {}",
         fmt::join(compare_manifests(parsed, again, true), ", "));
  expect(converter::write_manifest(again) == written, "is written in another way the second time");
}

}  // namespace ferry::fuzz
