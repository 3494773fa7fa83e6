"""``flex_attention`` for few queries and many keys, in Triton's interpreter and compiled ahead of time; what its
``kernel_options`` mean."""

import pytest

from tests.flex_decode_cases import DECODE
from tests.interpreter import chosen, results


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", [f"decoding {n}" for n in DECODE])
def test_interpreted(name, request):
    assert results("flex_interpreting.py", *chosen(request))[name] == ""
