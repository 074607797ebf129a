"""Meshes to test a parallel model on: a small set in which each valid pair of two settings' values occurs."""
from itertools import combinations, product
from math import lcm

LARGEST_WORLD = 8


def world_size(mesh):
    return lcm(mesh.get("tp", 1) * mesh.get("cp", 1), mesh.get("etp", 1) * mesh.get("ep", 1)) * mesh.get("pp", 1)


def pairs(setting):
    return set(combinations(sorted(setting.items()), 2))


def covering(axes, fits=lambda setting: True):
    """[{axis: value}] of {axis: values}, greedily: as few as that gives. Sequence parallelism needs tensor parallel ranks."""
    every = [dict(zip(axes, values)) for values in product(*axes.values())]
    every = [s for s in every if world_size(s) <= LARGEST_WORLD and not (s.get("sp") and s["tp"] == 1) and fits(s)]
    left = set().union(*map(pairs, every))
    chosen = []
    while left:
        chosen.append(max(every, key=lambda setting: len(pairs(setting) & left)))
        left -= pairs(chosen[-1])
    return chosen


def name_of(setting):
    """"tp2-cp2-sp": what is not as of one rank alone."""
    words = [axis if value is True else value if isinstance(value, str) else f"{axis}{value}"
             for axis, value in setting.items() if value is not False and value != 1 or value is True]
    return "-".join(words) or "alone"


def spread(models, settings, each):
    """(model, setting): every setting meets `each` of the models, in turn."""
    return [(models[(i + j * (len(models) // each or 1)) % len(models)], setting)
            for i, setting in enumerate(settings) for j in range(each)]


def prediction_layers(config):
    """The number of them in a config.json; hybrids that name no number have one."""
    return config.get("mtp_num_hidden_layers", config.get("num_nextn_predict_layers", int("linear_num_key_heads" in config)))


def layout_of(layers, stages, chunks, mtp):
    """--pipeline-model-parallel-layout of any number of layers: as even as it goes."""
    parts = [layers * (i + 1) // (stages * chunks) - layers * i // (stages * chunks) for i in range(stages * chunks)]
    return "E" + "|".join("t" * part for part in parts) + "m" * mtp + "L"
