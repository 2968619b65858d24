"""columns.py says of every sample what tar.py says of it, one by one."""

from __future__ import annotations

import numpy as np
import pytest
import tar_maker as tm

from data.columns import columns_of, parse_samples
from data.errors import DataError, StaleIndexError
from data.native import gathering
from data.tar import parse_sample


@pytest.fixture(autouse=True, params=["C", "numpy"])
def part(request, monkeypatch):
    """Everything here is true of both."""
    if request.param == "numpy":
        monkeypatch.setattr(gathering, "is_there", lambda: False)
    elif not gathering.is_there():
        pytest.skip("samples.so is not built")


ORDINARY = [
    tm.join_samples([(f"dir/{i:04d}", {"bin": b"x" * (i * 37 % 1500), "CLS": b"%d" % i})]) for i in range(40)
]
ODD = [
    tm.pax({"path": "long/" + "n" * 120 + ".bin"}) + tm.member("cut.bin", b"pax"),
    tm.long_name("y" * 150 + ".bin") + tm.member("cut.bin", b"gnu"),
    tm.member("a.bin", b"1") + tm.member("folder/", kind=b"5") + tm.member("a.cls", b"2"),
    tm.member("a.bin", b"1") + tm.member("._a.bin", b"mac") + tm.member("a.cls", b"2"),
    tm.member("a.bin", b"1") + tm.member("__meta__/a.json", b"{}") + tm.member("a.cls", b"2"),
    tm.member("a__b.bin", b"1") + tm.member("a__b.cls", b"2"),
    tm.member("x/a__b.bin", b"1") + tm.member("x/a__b.cls", b"2"),
    tm.member("v7.bin", b"old", b"\0", magic=tm.V7),
    tm.member("a.seg.png", b"1") + tm.member("a.PNG", b"2"),
    tm.member("a.bin", b"1") + bytes(1024) + tm.member("a.cls", b"2"),
    tm.member("dir.with.dots/a.bin", b"dots"),
    tm.member("größe.bin", b"utf-8") + tm.member("größe.cls", b"4"),
    tm.member(b"caf\xe9.bin", b"latin") + tm.member(b"caf\xe9.cls", b"4"),
    tm.member("signed.bin", b"s", signed=True),
    tm.member("a.bin", b"1") + tm.header(b"a.cls", 1, size_field=b"\x80" + bytes(10) + b"\x01") + tm.pad(b"9"),
    tm.member("q" * 95 + ".bin", b"wide"),
    tm.header(b"tail.bin", 3, prefix=b"front") + tm.pad(b"abc"),
    tm.member("empty.bin") + tm.member("empty.cls", b"3"),
    tm.member("a.GRÖSSE", b"1") + tm.member("a.cls", b"2"),
    tm.member("a.", b"no name") + tm.member("a.cls", b"2"),
    b"".join(tm.member(f"many.{i}", b"%d" % i) for i in range(40)),
]
DOUBLED = [
    tm.member("a.bin", b"1") + tm.member("a.bin", b"2"),
    tm.member("a.jpg", b"1") + tm.member("a.JPG", b"2"),
]


def laid_out(samples):
    """The samples one after the other in whole blocks, as a reader puts them."""
    size = np.array([len(sample) for sample in samples])
    padded = -(-size // 512) * 512
    place = np.cumsum(padded) - padded
    data = np.zeros(int(padded.sum()), np.uint8)
    for at, sample in zip(place, samples, strict=True):
        data[at : at + len(sample)] = np.frombuffer(sample, np.uint8)
    return data, place, size, np.arange(len(samples)) * 7, lambda i: "x.tar"


def check(samples):
    columns, keys, errors = parse_samples(*laid_out(samples))
    wrong = {slot: error for slot, error in errors}
    for i, sample in enumerate(samples):
        try:
            key, fields = parse_sample(sample, i * 7, "x.tar")
        except DataError as error:
            assert (str(wrong[i]), keys[i]) == (str(error), error.key)
            assert not columns.present[i] and not columns.sample(i)
        else:
            assert (keys[i], columns.sample(i)) == (key, fields)
            assert columns.present[i] and i not in wrong


@pytest.mark.parametrize("samples", [ORDINARY, ODD, DOUBLED, ORDINARY + ODD + DOUBLED], ids=["ordinary", "odd", "doubled", "all"])
def test_same_as_one_by_one(samples):
    check(samples)
    check(samples[::-1])
    for sample in samples:
        check([sample])


def test_random_mixtures():
    rng = np.random.default_rng(0)
    pool = ORDINARY + ODD + DOUBLED
    for _ in range(100):
        check([pool[i] for i in rng.integers(0, len(pool), rng.integers(1, 9))])


def test_bytes_spoilt_at_random():
    """Whatever they are, it is taken, read and refused as tar.py does it."""
    rng = np.random.default_rng(1)
    pool = ORDINARY[:8] + ODD + DOUBLED
    for _ in range(400):
        spoilt = bytearray(pool[rng.integers(len(pool))])
        for at in rng.integers(0, len(spoilt), rng.integers(1, 4)).tolist():
            spoilt[at] = rng.integers(256)
        if rng.random() < 0.2:
            del spoilt[int(rng.integers(1, len(spoilt))) :]
        try:
            parse_sample(bytes(spoilt), 7, "x.tar")
        except StaleIndexError as error:
            with pytest.raises(StaleIndexError) as raised:
                parse_samples(*laid_out([ORDINARY[0], bytes(spoilt)]))
            assert str(raised.value) == str(error)
        except DataError:
            pass
        else:
            check([bytes(spoilt), ORDINARY[0]])


def test_no_sample_is_put_together_by_hand_from_ordinary_headers(monkeypatch):
    """Ordinary ones never take the slow way."""
    monkeypatch.setattr("data.columns.locate_fields", None)
    parse_samples(*laid_out(ORDINARY))


@pytest.mark.parametrize(
    "spoil, why",
    [
        (lambda s: s[:20] + b"\xff" + s[21:], "broken header at byte 7"),
        (lambda s: s[:148] + b"0000000\0" + s[156:], "broken header at byte 7"),
        (lambda s: s[:1024] + b"\1" + s[1025:], "broken header at byte 1031"),
        (lambda s: s[:-512], "the data of 's.cls' is cut (0 of 1 bytes are there) at byte 1031"),
        (lambda s: s + tm.member("other.bin", b"1"), "it holds 's' and 'other'"),
        (lambda s: s + tm.member("s.x/y.z", b"1"), "it holds 's' and 's.x/y'"),
        (lambda s: bytes(512) + s, "no sample starts there"),
        (lambda s: bytes(2048), "no sample starts there"),
        (lambda s: s[512:], "broken header at byte 7"),
    ],
)
def test_bytes_that_are_no_sample_stop_the_run(spoil, why):
    whole = tm.member("s.bin", b"xyz") + tm.member("s.cls", b"1")
    with pytest.raises(StaleIndexError) as raised:
        parse_samples(*laid_out([whole, spoil(whole), whole]))
    assert str(raised.value) == (
        f"x.tar: its index does not fit it: sample at byte 7: {why}; delete the .idx file or run scripts/index_shards.py"
    )


def test_every_flipped_bit_of_a_header_is_noticed():
    """As tar.py notices it: nothing that it refuses is taken, nothing that it reads is read otherwise."""
    whole = tm.member("s.bin", b"xyz") + tm.member("s.cls", b"1")
    for position in [*range(512), *range(1024, 1536)]:
        spoilt = bytearray(whole)
        spoilt[position] ^= 1 << position % 8
        try:
            expected = parse_sample(bytes(spoilt), 0, "x.tar")
        except StaleIndexError:
            with pytest.raises(StaleIndexError):
                parse_samples(*laid_out([bytes(spoilt)]))
        else:
            columns, keys, _ = parse_samples(*laid_out([bytes(spoilt)]))
            assert (keys[0], columns.sample(0)) == expected


def test_columns_of_sample_dicts():
    columns = columns_of([{"__slot__": 2, "__key__": "k", "bin": b"abc"}, {"__slot__": 0, "cls": memoryview(b"1"), "n": 3}], 3)
    assert columns.present.tolist() == [True, False, True]
    assert [columns.sample(slot) for slot in range(3)] == [{"cls": b"1"}, {}, {"bin": b"abc"}]
