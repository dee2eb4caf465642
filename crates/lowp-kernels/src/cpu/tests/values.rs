//! Every input value, and every edge of blocks, tiles and chunks, against the reference.

use super::*;
use crate::reference::Reference;

/// Encodes `source` with every instruction set and compares all buffers with the reference.
fn check(case: &Case, shape: Shape, source: &Source<Cpu>, values: &[f32], tensor: f32) {
    let source_rounding = SourceRounding::F32;
    let reference = Reference {
        shape,
        kernel: case.kernel,
        values,
        source_rounding,
        tensor,
        random: None,
    };
    let expected: Vec<Vec<u8>> = case
        .specs
        .iter()
        .map(|spec| reference.encode(spec).unwrap())
        .collect();
    for isa in Isa::all() {
        let job = encode_job(case.kernel, &case.specs, shape, source.clone(), tensor);
        let targets = job.targets.clone();
        let plan = plan(Work::Encode(vec![job])).unwrap().with_isa(isa);
        plan.run(&StepScalars::default()).unwrap();
        for (target, expected) in targets.iter().zip(&expected) {
            let found = target.bytes.read().unwrap();
            let at = found.iter().zip(expected).position(|(a, b)| a != b);
            let spec = &target.spec;
            assert_eq!(at, None, "{shape} {isa:?} {spec:?} {:?}", case.kernel);
            assert_eq!(found.len(), expected.len());
        }
    }
}

#[test]
fn all_bf16_values() {
    let halves: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
    // Not `to_f32`, which quiets a signalling NaN.
    let widened = |x: &bf16| f32::from_bits(u32::from(x.to_bits()) << 16);
    let values: Vec<f32> = halves.iter().map(widened).collect();
    let source = Source::Bf16(CpuBuffer::from_vec(halves));
    for case in cases() {
        // Along a row the values of a block lie close together, down a column far apart.
        for shape in [Shape::new(64, 1024), Shape::new(512, 128)] {
            for tensor in [1.0, 0.003] {
                check(&case, shape, &source, &values, tensor);
            }
        }
    }
}

#[test]
fn a_million_bit_patterns() {
    let random = Philox::new(11, 4);
    let values: Vec<f32> = (0..1 << 18)
        .flat_map(|i| random.block(i).map(f32::from_bits))
        .collect();
    let source = Source::F32(CpuBuffer::from_vec(values.clone()));
    for case in cases() {
        check(&case, Shape::new(1024, 1024), &source, &values, 1e-3);
    }
}

#[test]
fn every_edge_of_blocks_and_vectors() {
    for case in cases() {
        let unit = case.columns();
        let blocks = case.kernel.blocks.iter().flatten().flatten();
        let block = blocks.copied().max().unwrap_or(64);
        let rows = [1, 2, block - 1, block, block + 1, 2 * block + 1];
        let cols = if unit == 1 {
            vec![1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129]
        } else {
            vec![unit, 2 * unit, 3 * unit, 7 * unit]
        };
        for (n, &rows) in rows.iter().enumerate() {
            for &cols in &cols {
                let shape = Shape::new(rows, cols);
                let (source, values) =
                    source(&values(shape.elements(), n as u64, true), n % 2 == 1);
                check(&case, shape, &source, &values, 40.0);
            }
        }
    }
}

/// Rows so long that a tile is walked in several chunks.
#[test]
fn every_edge_of_chunks() {
    for (n, case) in cases().iter().enumerate() {
        let unit = case.columns();
        for cols in [5000, 40_000] {
            let shape = Shape::new(
                if cols > 5000 { 33 } else { 130 },
                cols / unit * unit + unit,
            );
            let (source, values) = source(&values(shape.elements(), n as u64, false), n % 2 == 1);
            check(case, shape, &source, &values, 40.0);
        }
    }
}

/// The digest of the codes of f32 bit patterns, 2^22 at a time, from every `step`-th run of them.
fn digest(isa: Isa, element: Code, step: usize) -> u64 {
    const RUN: usize = 1 << 22;
    let case = case(element, ScaleRule::Tensor, None, None);
    let buffer = CpuBuffer::from_vec(vec![0f32; RUN]);
    let shape = Shape::new(RUN >> 10, 1 << 10);
    let job = encode_job(
        case.kernel,
        &case.specs,
        shape,
        Source::F32(buffer.clone()),
        1.0,
    );
    let bytes = job.targets[0].bytes.clone();
    let plan = plan(Work::Encode(vec![job])).unwrap().with_isa(isa);
    let mut digest = 0xCBF2_9CE4_8422_2325u64;
    for run in (0..1usize << 10).step_by(step) {
        let first = (run * RUN) as u32;
        for (value, bits) in buffer.write().unwrap().iter_mut().zip(first..=u32::MAX) {
            *value = f32::from_bits(bits);
        }
        plan.run(&StepScalars::default()).unwrap();
        for word in bytes.read().unwrap().as_chunks::<8>().0 {
            digest = (digest ^ u64::from_le_bytes(*word)).wrapping_mul(0x0000_0100_0000_01B3);
            digest ^= digest >> 29;
        }
    }
    digest
}

/// Digests of the codes of all 2^32 bit patterns with `LOWP_EXHAUSTIVE=1`, otherwise of every 41st
/// run of 2^22: one table, whatever the instruction set.
#[test]
fn digests_of_all_bit_patterns() {
    let whole = std::env::var_os("LOWP_EXHAUSTIVE").is_some_and(|v| v == "1");
    let codes = [Code::E4M3, Code::E5M2, Code::E2M1];
    let table = |isa| {
        let step = if whole { 1 } else { 41 };
        codes.map(|code| format!("{code} {:016x}", digest(isa, code, step)))
    };
    let portable = table(Isa::Portable);
    for isa in Isa::all() {
        assert_eq!(table(isa), portable, "{isa:?}");
    }
    if whole {
        insta::assert_snapshot!(portable.join("\n"), @r"
        E4M3 b5630f426229c72b
        E5M2 22c8dba99384925c
        E2M1 02d3ebc1f756ee15
        ");
    } else {
        insta::assert_snapshot!(portable.join("\n"), @r"
        E4M3 3fbb39107e5c8262
        E5M2 deb9ddf9ab115e9f
        E2M1 11f61f8bf00cbd6f
        ");
    }
}
