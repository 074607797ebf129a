// The formats (rollout/grammar/format.h) of answers that a request constrains.
#pragma once

#include <optional>
#include <string>

#include "serve/api/fields.h"
#include "serve/api/generation_request.h"
#include "serve/api/served_model.h"

namespace ferry::serve {

struct RequestedFormat {
  std::string param{};  // the field that asks for it
  ordered_json format{};
};

// OpenAI's response_format, vLLM's structured_outputs and its older guided_*; nothing if the answer
// is free. Throws ApiError 400 if there are two of them, or one that is not supported.
std::optional<RequestedFormat> requested_format(const Fields& fields);

// A call of one of the tools, or (`is_parallel`) several, as the format's families write them.
// `name`: of the only tool that may be called; empty: any. Throws ApiError 400 if it is none of the
// tools.
RequestedFormat format_of_calls(rollout::text::ToolFormat format,
                                const ordered_json& tools,
                                const std::string& name,
                                bool is_parallel);

// Holds the request's answers to the format, behind the thoughts that they may have, after its
// grammar has been made once. Throws ApiError 400 that names what of a schema is not supported, or
// the field that would cut answers short.
void hold_to(const RequestedFormat& requested,
             const ServedModel& model,
             GenerationRequest& request);

}  // namespace ferry::serve
