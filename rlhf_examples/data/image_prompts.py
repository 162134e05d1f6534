"""Prompts with images: records read by a vision-language model's processor."""

import json
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from rlhf_examples.common.arguments import VisionGRPOArguments
from rlhf_examples.common.ranks import gather_objects, interleaved, is_main_process, rank_share
from rlhf_examples.data.examples import Examples, require_usable
from rlhf_examples.data.records import load_records
from rlhf_examples.data.texts import BadRecord, RecordFormat, SkippedRecords, read_field, record_of

IMAGES = ("image", "images")  # columns: a path from the folder of the records' file, or a list of them


def load_prompts(processor: Any, args: VisionGRPOArguments) -> Examples:
    """The raw records that can be used; each rank reads the images of its share once. Rank 0 prints which records were
    left out, and why.

    Raises ValueError for an image that cannot be read, and if no record can be used.
    """
    records: Any = load_records(args.data_path, cache_dir=args.data_output_path or None)
    reasons = interleaved(gather_objects([defect_of(raw, processor, args) for raw in rank_share([*records])]))
    if error := next((reason for reason in reasons if isinstance(reason, ValueError)), None):
        raise error
    skipped, usable = SkippedRecords(), []
    for index, (raw, reason) in enumerate(zip(records, reasons, strict=True)):
        if skipped.usable(raw["source"], raw["number"], reason):
            usable.append(index)
    require_usable(skipped)
    if is_main_process() and skipped.counts:
        print(skipped)
    return Examples(records.select(usable), skipped)


def defect_of(raw: dict[str, Any], processor: Any, args: VisionGRPOArguments) -> str | ValueError:
    """Why a record cannot be used, empty if it can; or the error that ends the run."""
    try:
        prompt_of(raw, processor, args)
    except BadRecord as defect:
        return str(defect)
    except ValueError as error:
        return error
    return ""


def prompt_of(raw: dict[str, Any], processor: Any, args: VisionGRPOArguments) -> dict[str, Any]:
    """A raw row's prompt, as `roll_out` and rewards take it: text, tokens, the processor's other tensors, and the
    record's other columns as JSON.

    Raises BadRecord if the record cannot be used, ValueError if an image cannot be read.
    """
    record, form = record_of(raw), RecordFormat.from_args(args)
    if form.prompt_column not in record:
        raise form.missing(("prompt",), record)
    prompt, images = read_field(form.named(record), "prompt"), record.get("images") or [record.get("image")]
    if not isinstance(prompt, str):
        raise BadRecord(f"{form.prompt_column} is not a text")
    if not isinstance(images, list) or not all(isinstance(path, str) and path for path in images):
        raise BadRecord("neither image, a path, nor images, a list of paths")
    where, paths = f"{raw['source']}, record {raw['number']}: ", [Path(raw["source"]).parent / path for path in images]
    if missing := [str(path) for path in paths if not path.is_file()]:
        raise ValueError(f"{where}there is no image {missing[0]!r}; a path begins at the folder of the records' file")
    parts = [{"type": "image", "path": str(path)} for path in paths]
    parts.append({"type": "text", "text": form.apply_input_template(prompt)})
    settings: dict[str, Any] = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    settings |= {"add_generation_prompt": True, **form.template_settings(record)}
    try:
        inputs = dict(processor.apply_chat_template([{"role": "user", "content": parts}], **settings))
    except TemplateError as error:
        raise BadRecord(f"the chat template rejects it: {error}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{where}{error}") from error
    ids, _ = inputs.pop("input_ids")[0].tolist(), inputs.pop("attention_mask")
    if len(ids) > args.max_prompt_seq_len:
        raise BadRecord(f"longer than {args.max_prompt_seq_len} tokens")
    columns = {name: value for name, value in record.items() if name not in (form.prompt_column, *IMAGES)}
    return {"prompt": prompt, "prompt_ids": ids, "model_inputs": inputs, "columns": json.dumps(columns)}
