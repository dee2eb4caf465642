"""The table of peers and its bars, from a recorded sitting: no GPU, no torch."""

import contextlib
import io
import json
import os
import shutil
import stat
import sys
import tempfile
import unittest
import unittest.mock

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))

import bars  # noqa: E402
import table  # noqa: E402

BARS = """# Comments stay.
device = "NVIDIA H200"

["encode bf16 both"."1 x 16384x16384"]
"fp8-delayed" = { bar = 0.845, goal = 0.92, te = 0.92, te_goal = 1.0 } # so does this
"mxfp8" = { bar = 0.81 }

["adamw"."16 x 4096x4096"]
"-" = { bar = 0.887, goal = 0.9 }
"""


class Folder(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)
        shutil.copy(os.path.join(HERE, "sitting.json"), self.folder)
        self.bars = self.write("bars.toml", BARS)

    def path(self, name):
        return os.path.join(self.folder, name)

    def write(self, name, text):
        with open(self.path(name), "w", encoding="utf-8") as file:
            file.write(text)
        return self.path(name)

    def read(self, name):
        with open(self.path(name), encoding="utf-8") as file:
            return file.read()

    def change_sitting(self, change):
        sitting = json.loads(self.read("sitting.json"))
        change(sitting)
        self.write("sitting.json", json.dumps(sitting))

    def run_table(self, *args):
        """What the command prints, and the message that it fails with or None."""
        with contextlib.redirect_stdout(io.StringIO()) as out:
            try:
                table.main([self.folder, *args])
                return out.getvalue(), None
            except SystemExit as error:
                return out.getvalue(), str(error)


class Table(Folder):
    def test_equal_work_stands_first_and_the_rest_says_what_differs(self):
        text, error = self.run_table()
        self.assertIsNone(error)
        equal, rest = text.split("All rows")
        self.assertRegex(equal, r"encode bf16 both fp8-delayed +1 x 16384x16384 +310\.0 +0\.865 +TE: fp8 known scale, bf16 both +292\.0 +0\.94\n")
        # A graph that is faster counts for the peer, and is named.
        self.assertRegex(equal, r"adamw +16 x 4096x4096 +1808\.6 +0\.907 +TE: Adam +2150\.0 +1\.19 +G\n")
        self.assertNotIn("AdamW(fused)", equal)
        self.assertNotIn("partial cast", equal)
        self.assertRegex(rest, r"PyTorch: AdamW\(fused\) +2296\.0 +1\.27 +a\n")
        self.assertRegex(rest, r"TE: mxfp8 partial cast, bf16 both +1011\.0 +3\.20 +f\n")
        self.assertRegex(rest, r"\namax bf16 +1 x 16384x16384 +138\.8 +0\.909\n")
        self.assertIn("\na: the peer reads f32 gradients, lowp bf16\n", rest)
        self.assertNotIn("\nb: ", rest)
        self.assertEqual(self.read("table.txt"), text)
        rows = json.loads(self.read("table.json"))["rows"]
        self.assertEqual(len(rows), 5)

    def test_an_absent_peer_is_named(self):
        self.change_sitting(lambda sitting: sitting["peers"].clear())
        text, error = self.run_table("--bars", self.bars)
        self.assertIsNone(error)
        self.assertIn("absent: torchao to_mx: ModuleNotFoundError", text)
        self.assertIn("nothing; no peer was measured", text)
        # Its bar is not judged, and that is said.
        self.assertIn("1 not judged:\n  encode bf16 both fp8-delayed 1 x 16384x16384: TE/lowp not measured, bar 0.92\n", text)

    def test_a_malformed_sitting_is_an_error(self):
        for text in ("{", "[]", '{"lowp": {}}', self.read("sitting.json").replace('"share": 0.907', '"share": "0.907"')):
            self.write("sitting.json", text)
            _, error = self.run_table()
            self.assertRegex(error, r"sitting\.json .*measure again with --lowp PROGRAM", text)
        os.remove(self.path("sitting.json"))
        self.assertIn("sitting.json cannot be read", self.run_table()[1])


class Bars(Folder):
    def test_bars_that_hold_pass_and_goals_are_listed(self):
        text, error = self.run_table("--bars", self.bars)
        self.assertIsNone(error)
        self.assertIn("2 below the goal only:\n  encode bf16 both fp8-delayed 1 x 16384x16384: share of a copy 0.865, goal 0.92\n"
                      "  encode bf16 both fp8-delayed 1 x 16384x16384: TE/lowp 0.942, goal 1.0\n", text)
        self.assertNotIn("below the bar", text)

    def test_a_miss_fails_and_is_listed(self):
        def slower(sitting):
            sitting["lowp"]["rows"][2]["share"] = 0.8099
            sitting["peers"][1]["us"] = sitting["peers"][1]["graph_us"] = 280.0
        self.change_sitting(slower)
        text, error = self.run_table("--bars", self.bars)
        self.assertEqual(error, "table.py: 2 below the bar, listed above")
        self.assertIn("2 below the bar:\n  encode bf16 both fp8-delayed 1 x 16384x16384: TE/lowp 0.903, bar 0.92, goal 1.0\n"
                      "  encode bf16 both mxfp8 1 x 16384x16384: share of a copy 0.810, bar 0.81\n", text)
        self.assertEqual(self.read("table.txt"), text)

    def test_what_is_no_number_is_a_miss(self):
        self.change_sitting(lambda sitting: sitting["lowp"]["rows"][2].update(share=float("nan")))
        self.assertEqual(self.run_table("--bars", self.bars)[1], "table.py: 1 below the bar, listed above")

    def test_bars_are_raised_but_lowered_only_when_that_is_asked_for(self):
        self.change_sitting(lambda sitting: sitting["lowp"]["rows"][1].update(share=0.931))
        text, error = self.run_table("--bars", self.bars, "--raise")
        self.assertIsNone(error)
        self.assertIn("2 bars changed", text)
        raised = BARS.replace("bar = 0.845", "bar = 0.911").replace("te = 0.92,", "te = 0.922,")
        self.assertEqual(self.read("bars.toml"), raised)
        text, error = self.run_table("--bars", self.bars, "--raise", "--lower")
        self.assertIsNone(error)
        self.assertIn("mxfp8, 1 x 16384x16384: bar 0.81 -> 0.808\n", text)
        self.assertEqual(self.read("bars.toml"), raised.replace("bar = 0.81 ", "bar = 0.808 "))
        self.assertIn("0 bars changed", self.run_table("--bars", self.bars, "--raise", "--lower")[0])

    def test_a_bar_in_another_form_is_not_rewritten_in_part(self):
        text = BARS.replace('"mxfp8" = { bar = 0.81 }', '"mxfp8".bar = 0.5')
        self.write("bars.toml", text)
        text, error = self.run_table("--bars", self.bars, "--raise")
        self.assertIn("mxfp8, 1 x 16384x16384 is on no line of its own", error)

    def test_a_bar_without_a_row_is_an_error_unless_it_was_not_asked_for(self):
        self.write("bars.toml", BARS.replace('"mxfp8"', '"mxpf8"'))
        text, error = self.run_table("--bars", self.bars)
        self.assertIn("Equal work", text)
        self.assertIn("1 of the bars in", error)
        self.assertIn("have no row in the bench: encode bf16 both, mxpf8, 1 x 16384x16384", error)
        self.change_sitting(lambda sitting: sitting.update(filter="adamw"))
        self.assertIsNone(self.run_table("--bars", self.bars)[1])

    def test_bars_of_another_device_or_for_other_shapes_do_not_hold(self):
        self.change_sitting(lambda sitting: sitting["lowp"].update(device="NVIDIA H100"))
        self.assertIn("holds the bars of NVIDIA H200, and this was measured on NVIDIA H100", self.run_table("--bars", self.bars)[1])
        self.change_sitting(lambda sitting: sitting.update(shrink=8))
        text, error = self.run_table("--bars", self.bars)
        self.assertIsNone(error)
        self.assertIn("divided by 8: no bar holds", text)
        self.assertIn("no bar holds", self.run_table("--bars", self.bars, "--raise")[1])

    def test_a_malformed_file_of_bars_is_an_error(self):
        for change, message in [
            (("device", "gadget"), "does not say whose bars"),
            (("{ bar = 0.81 }", "0.81"), "encode bf16 both, mxfp8, 1 x 16384x16384 is no table"),
            (("bar = 0.81", "bra = 0.81"), "`bra` is not known; there are bar, goal, te, te_goal"),
            (("bar = 0.81", "bar = true"), "bar is True; it must be a number"),
            (("bar = 0.81", "goal = 0.81"), "has no bar"),
            (("{ bar = 0.81 }", "{ bar = "), "is no TOML"),
        ]:
            self.write("bars.toml", BARS.replace(*change))
            self.assertIn(message, self.run_table("--bars", self.bars)[1])
        self.assertIn("the bars cannot be read", self.run_table("--bars", self.path("none.toml"))[1])

    def test_the_bars_in_the_repository_are_valid(self):
        folder = os.path.join(HERE, "../../bars")
        for name in os.listdir(folder):
            read = bars.Bars.read(os.path.join(folder, name))
            # --raise can rewrite each of them.
            high = {row: {key: 50.0 for key in values} for row, values in read.rows.items()}
            count = sum(len(values.keys() & bars.KEYS.keys()) for values in read.rows.values())
            self.assertEqual(len(read.raised(high)[1]), count, name)


class Measuring(Folder):
    def program(self, text):
        path = self.write("lowp", f"#!{sys.executable}\n{text}")
        os.chmod(path, os.stat(path).st_mode | stat.S_IXUSR)
        return path

    def test_a_sitting_without_any_peer(self):
        # In place of the bench; no torch is installed beside these tests, or no GPU is there.
        lowp = json.dumps(json.loads(self.read("sitting.json"))["lowp"])
        program = self.program(f"import sys\nassert sys.argv[1:4] == ['bench', '--device', 'cuda'], sys.argv\n"
                               f"open(sys.argv[sys.argv.index('--json') + 1], 'w').write({lowp!r})\n")
        os.remove(self.path("sitting.json"))
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        self.addCleanup(os.environ.pop, "CUDA_VISIBLE_DEVICES")
        text, error = self.run_table("--lowp", program, "--te", self.path("none"), "--bars", self.bars)
        self.assertIsNone(error)
        self.assertIn(f"absent: TE: {self.path('none')} is no folder\n", text)
        self.assertIn("absent: PyTorch and torchao: ended with code 1: ", text)
        # The same again from what was measured.
        self.assertEqual(self.run_table("--bars", self.bars)[0], text)

    def test_a_group_of_te_that_crashes_takes_only_its_own_rows(self):
        row = {"peer": "TE", "work": "Adam", "shape": "16 x 4096x4096", "us": 2.0}
        outputs = [
            ('{"facts": {}, "device": "NVIDIA H200"}\nprinted by a kernel\n' + json.dumps(row), "ended with code -11"),
            (json.dumps({**row, "us": 3.0, "no_graph": "no capture"}) + '\n{"peer": "TE", "wo', "took more than 150 s"),
            (json.dumps({"peer": "TE", "work": "Adam", "shape": "a shape", "error": "only 0.5 of the bytes"}), None),
            (json.dumps({"peer": "TE", "work": "adamw_mxfp8", "error": "undefined symbol"}), None),
            *[("", None) for _ in table.TE_GROUPS[4:]],
        ]
        sitting = dict(lowp=dict(device="NVIDIA H200"), peers=[], absent=[], facts={})
        with unittest.mock.patch.object(table, "finished", side_effect=outputs):
            table.transformer_engine(self.folder, [], sitting)
        self.assertEqual(sitting["peers"], [row, {**row, "us": 3.0}])
        self.assertEqual(sitting["absent"], [
            f"TE, of {', '.join(table.TE_GROUPS[0])}: ended with code -11",
            "TE, Adam 16 x 4096x4096 as a graph: no capture",
            f"TE, of {', '.join(table.TE_GROUPS[1])}: took more than 150 s",
            "TE, Adam a shape: only 0.5 of the bytes",
            "TE, adamw_mxfp8 : undefined symbol",
        ])
        other = [('{"facts": {}, "device": "NVIDIA L4"}', None)]
        with unittest.mock.patch.object(table, "finished", side_effect=other):
            with self.assertRaisesRegex(bars.Invalid, "lowp was measured on NVIDIA H200, TE on NVIDIA L4"):
                table.transformer_engine(self.folder, [], sitting)

    def test_a_bench_that_fails_ends_the_sitting(self):
        error = self.run_table("--lowp", self.program("raise SystemExit(3)"))[1]
        self.assertRegex(error, r"lowp bench --device cuda .*` ended with code 3$")


if __name__ == "__main__":
    unittest.main()
