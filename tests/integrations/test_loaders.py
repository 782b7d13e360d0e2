"""The loaders that an integration puts into the place of a framework's behave as those, copies of them too."""

from __future__ import annotations

import copy
import pickle

import pytest

from lightck.integrations.loaders import WrappedLoader


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_has_the_length_and_the_attributes_of_the_loader(copied):
    class_of = type(copied(WrappedLoader([3, 5, 3])))
    assert class_of is WrappedLoader
    found = copied(WrappedLoader([3, 5, 3]))
    assert (len(found), found.count(3)) == (3, 2)


def test_an_attribute_that_the_loader_lacks_is_an_attribute_error():
    with pytest.raises(AttributeError, match="batch_size"):
        _ = WrappedLoader([]).batch_size
