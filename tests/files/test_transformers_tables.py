"""The tables that are read from the source files of transformers, compared with those that it has when imported."""

import pytest

from paged_backend.files import transformers_tables


def config_classes():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return CONFIG_MAPPING_NAMES


def test_configurations_are_those_of_transformers():
    assert transformers_tables.config_classes() == config_classes()


@pytest.mark.parametrize(
    ("table", "types"),
    [
        ("MODEL_FOR_CAUSAL_LM_MAPPING", transformers_tables.decoder_types),
        ("MODEL_FOR_MASKED_LM_MAPPING", transformers_tables.masked_types),
        ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", transformers_tables.translating_types),
    ],
)
def test_types_are_those_of_transformers(table, types):
    """The tables of transformers find a class by its name, so that none needs to be imported."""
    import transformers

    classes = getattr(transformers, table)
    assert set(types()) == {name for name, kind in config_classes().items() if type(kind, (), {}) in classes}


def test_quantization_methods_are_those_of_transformers():
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    assert set(transformers_tables.quantization_methods()) == set(AUTO_QUANTIZATION_CONFIG_MAPPING)
