"""The line of each value in a file: the one that an editor shows, or none."""

import tomllib

from core.training.config.fields import flatten
from core.training.config.run import RunConfig, known_fields
from core.training.config.sources import merge
from core.training.config.toml_files import lines_of, read_toml


def lines(text):
    return lines_of(text, flatten(tomllib.loads(text), known_fields())[0])


def test_only_a_newline_ends_a_line():
    text = 'device = "a\u2028b\u0085c"  # \u2029\n[optimizer]\nlr = 1\n'
    assert lines(text) == {"device": 1, "optimizer.lr": 3}


TANGLED = r"""[training]
output = '''
lr = 1 QQQ [
[optimizer]'''  # QQQ
seed = 5 # ''' [
tensorboard = false
[data]
train = [ # ]
  "a]", "lr = 3", '''
[model]
''', "b" ]
"tokenizer" = "\"'''"
seed = 7
[[data_parallel]]
overlap = 3
[optimizer.lr_schedule_options]
a.b = 3
[  "optimizer"  ]
lr = 1
""".replace("QQQ", '"' * 3)


def test_what_stands_in_texts_and_lists_is_no_setting():
    assert lines(TANGLED) == {
        "training.output": 2,
        "training.seed": 5,
        "training.tensorboard": 6,
        "data.train": 8,
        "data.tokenizer": 12,
        "data.seed": 13,
        "data_parallel": 14,
        "optimizer.lr_schedule_options": 16,
        "optimizer.lr": 19,
    }


def test_a_line_that_is_not_found_for_sure_is_not_told(tmp_path):
    strange = "[training]\nseed = 3\noutput = '''\n" + "]\n" * 300 + "'''\ntrain_steps = 5\n"
    assert lines(strange) == {"training.seed": 2}
    path = tmp_path / "run.toml"
    path.write_text(strange)
    origin = merge(["--config", str(path)]).loaded().origin
    assert origin["training.train_steps"] == str(path) and origin["training.seed"] == f"{path}:2"


def test_a_mark_at_the_beginning_of_a_file_is_no_part_of_it(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf[optimizer]\r\nlr = 0.5\r\n")
    assert RunConfig.from_toml(path).optimizer.lr == 0.5
    assert read_toml(path, known_fields()).lines == {"optimizer.lr": 2}
