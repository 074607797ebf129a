// The same reports for programs.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "converter/adapter/convert_adapter.h"
#include "converter/adapter/merge_adapter.h"
#include "converter/adapter/split_adapter.h"
#include "converter/convert.h"
#include "converter/delta/apply_delta.h"
#include "converter/delta/delta.h"
#include "converter/delta/make_delta.h"
#include "converter/diff.h"
#include "converter/digest_checkpoint.h"
#include "converter/inspect.h"
#include "converter/verify.h"
#include "distckpt/base/error.h"

namespace ferry::cli {

nlohmann::ordered_json convert_json(const converter::ConvertReport& report);
nlohmann::ordered_json adapter_json(const converter::ConvertAdapterReport& report);
nlohmann::ordered_json merge_json(const converter::MergeReport& report);
nlohmann::ordered_json split_json(const converter::SplitReport& report, std::int64_t rank);
nlohmann::ordered_json make_delta_json(const converter::MakeDeltaReport& report);
nlohmann::ordered_json verify_delta_json(const converter::VerifyDeltaReport& report);
nlohmann::ordered_json delta_json(const converter::DeltaSummary& summary);
nlohmann::ordered_json inspect_json(const converter::InspectReport& report,
                                    std::string_view filter);
nlohmann::ordered_json verify_json(const converter::VerifyReport& report);
nlohmann::ordered_json diff_json(const converter::DiffReport& report);
nlohmann::ordered_json check_json(const converter::ManifestCheck& check);
nlohmann::ordered_json error_json(const Error& error);

// The text of `json`, also where names of files are not UTF-8. `indent` -1: in one line.
std::string json_text(const nlohmann::ordered_json& json, int indent = 2);

}  // namespace ferry::cli
