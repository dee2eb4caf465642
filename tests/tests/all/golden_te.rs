//! Bytes that TransformerEngine 2.20.2 wrote on a Hopper GPU: ours are equal.
//!
//! `te_2.20.2_hopper` has values over many binades, in bf16 and f32, cast by TE's current-scaling FP8
//! quantizer and (bf16) by its partial cast to MXFP8, both E4M3 with rows and columns.
//! `tests/golden/te_hopper.py` makes it.

use half::bf16;
use lowp_format::{
    AnyRecipe, Code, Form, Fp8Format, Orientation, Part, QuantizedTensor, RecipeOptions, Shape,
    SourceRounding, Usage, tensor_scale,
};
use lowp_kernels::{AmaxJob, Backend, Cpu, CpuBuffer, Source, Work};
use lowp_shard::{quantize, scales_in_form};
use lowp_tests::golden::Golden;

const FILE: &str = "te_2.20.2_hopper";

/// Every tensor of the file.
const TENSORS: [&str; 16] = [
    "bf16.fp8current.amax",
    "bf16.fp8current.col",
    "bf16.fp8current.row",
    "bf16.fp8current.scale",
    "bf16.fp8current.scale_inv",
    "bf16.input",
    "bf16.mxfp8_partial.col",
    "bf16.mxfp8_partial.col_inv",
    "bf16.mxfp8_partial.row",
    "bf16.mxfp8_partial.row_inv",
    "f32.fp8current.amax",
    "f32.fp8current.col",
    "f32.fp8current.row",
    "f32.fp8current.scale",
    "f32.fp8current.scale_inv",
    "f32.input",
];

fn source(golden: &Golden, dtype: &str) -> (Shape, Source<Cpu>) {
    let name = format!("{dtype}.input");
    let shape = Shape::from_dims(&golden.shape(&name)).expect("a matrix");
    let source = if dtype == "f32" {
        Source::F32(Cpu.upload(&golden.f32(&name)).expect("room"))
    } else {
        let halves = golden.bytes(&name).chunks_exact(2);
        let halves: Vec<bf16> = halves
            .map(|b| bf16::from_bits(u16::from_le_bytes([b[0], b[1]])))
            .collect();
        Source::Bf16(Cpu.upload(&halves).expect("room"))
    };
    (shape, source)
}

fn cast(golden: &Golden, dtype: &str, recipe: &str) -> QuantizedTensor<CpuBuffer<u8>> {
    let e4m3 = RecipeOptions::default().with("format", Fp8Format::E4M3);
    let recipe = AnyRecipe::from_name(recipe, &e4m3).expect("a recipe");
    let (shape, source) = source(golden, dtype);
    quantize(&Cpu, recipe, shape, Usage::BOTH, source, None).expect("a tensor")
}

fn assert_same(found: &[u8], golden: &Golden, name: &str) {
    assert!(TENSORS.contains(&name), "{name} is not listed");
    let expected = golden.bytes(name);
    let at = found.iter().zip(expected).position(|(a, b)| a != b);
    assert_eq!(at, None, "{name}: first different byte");
    assert_eq!(found.len(), expected.len(), "{name}: bytes");
}

fn part(tensor: &QuantizedTensor<CpuBuffer<u8>>, o: Orientation, part: Part) -> Vec<u8> {
    let buffer = tensor.part(o, part).expect("a buffer");
    Cpu.download(&buffer.storage).expect("bytes")
}

const SIDES: [(Orientation, &str); 2] = [
    (Orientation::Rowwise, "row"),
    (Orientation::Columnwise, "col"),
];

#[test]
fn the_file_has_the_tensors_that_are_compared() {
    assert_eq!(Golden::open(FILE).tensors(), TENSORS);
}

#[test]
fn current_scaling_gives_the_bytes_of_te() {
    let golden = Golden::open(FILE);
    for dtype in ["bf16", "f32"] {
        let name = |what: &str| format!("{dtype}.fp8current.{what}");
        let tensor = cast(&golden, dtype, "fp8-current");
        for (orientation, side) in SIDES {
            let data = part(&tensor, orientation, Part::Data);
            assert_same(&data, &golden, &name(side));
        }
        let scale_inv = part(&tensor, Orientation::Rowwise, Part::DecodeScale);
        assert_same(&scale_inv, &golden, &name("scale_inv"));

        let (shape, source) = source(&golden, dtype);
        let out = Cpu.alloc::<f32>(1).expect("room");
        let job = AmaxJob {
            shape,
            start: 0,
            source,
            source_rounding: SourceRounding::F32,
            out: out.clone(),
            tensor: Some(0),
            blocks: Vec::new(),
            hadamard: false,
        };
        Cpu.once(Work::Amax(vec![job])).expect("an amax");
        let amax = Cpu.download(&out).expect("a value")[0];
        assert_same(&amax.to_le_bytes(), &golden, &name("amax"));
        let scale = tensor_scale(amax, Code::E4M3, false, 0.0);
        assert_same(&scale.to_le_bytes(), &golden, &name("scale"));
    }
}

#[test]
fn mxfp8_gives_the_bytes_of_the_partial_cast_of_te() {
    let golden = Golden::open(FILE);
    let tensor = cast(&golden, "bf16", "mxfp8");
    for (orientation, side) in SIDES {
        let name = format!("bf16.mxfp8_partial.{side}");
        assert_same(&part(&tensor, orientation, Part::Data), &golden, &name);
        let scales = scales_in_form(&Cpu, &tensor, orientation, Form::Padded);
        let (_, scales) = scales.expect("a form").expect("block scales");
        assert_same(&scales, &golden, &format!("{name}_inv"));
    }
}
