// The formats that are read, a function each.
#pragma once

#include "converter/open/checkpoint.h"
#include "converter/stored/locate.h"
#include "converter/stored/stored.h"

namespace ferry::converter {

Stored read_stored(const Location& location, const OpenOptions& options);

Stored read_archive(const Location& location);  // Ferry's own
Stored read_torch_save(const Location& location, const OpenOptions& options);
Stored read_legacy(const Location& location, const OpenOptions& options);
Stored read_dcp(const Location& location, const OpenOptions& options);
Stored read_fsdp(const Location& location, const OpenOptions& options);
// The factors of a LoRA adapter in the same files, under PEFT's names; without a Hugging Face side.
Stored read_fsdp_adapter(const Location& location);
Stored read_zarr(const Location& location, const OpenOptions& options);
Stored read_torch_dist(const Location& location, const OpenOptions& options);

// The Hugging Face side of a checkpoint whose tensors have its names: beside them, or where
// --hf-config says. Throws Error(kNotFound).
HfForm hf_form_of(const Location& location, const OpenOptions& options);

// The Hugging Face side of a checkpoint of Megatron's names: --hf-config names it, else it lies
// beside the checkpoint or in its sidecar. Nothing if it has none.
std::optional<HfForm> find_hf_form(const Location& location, const OpenOptions& options);

}  // namespace ferry::converter
