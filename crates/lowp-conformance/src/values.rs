//! Every input value, and every edge of blocks, tiles and chunks, against the reference.

use super::*;

/// Encodes `source` on every rig and compares all buffers with the reference.
fn check<B: Backend>(
    rigs: &[Rig<B>],
    case: &Case,
    shape: Shape,
    source: &Source<B>,
    values: &[f32],
    value: f32,
) {
    let outer = case.outer(shape, value);
    let oracle = Oracle::new(case, shape, values, outer.clone());
    let specs = case.specs();
    let expected: Vec<Vec<u8>> = specs.iter().map(|spec| oracle.encode(spec)).collect();
    for rig in rigs {
        let job = encode_job(rig, case, &specs, shape, source.clone(), &outer);
        let targets = job.targets.clone();
        rig.run(Work::Encode(vec![job]));
        for (target, expected) in targets.iter().zip(&expected) {
            let found = rig.content::<u8>(&target.bytes);
            let at = found.iter().zip(expected).position(|(a, b)| a != b);
            let spec = &target.spec;
            assert_eq!(at, None, "{shape} {rig:?} {spec:?} {:?}", case.kernels());
            assert_eq!(found.len(), expected.len());
        }
    }
}

pub fn all_bf16_values<B: Backend>(rigs: &[Rig<B>]) {
    let halves: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
    // Not `to_f32`, which quiets a signalling NaN.
    let widened = |x: &bf16| f32::from_bits(u32::from(x.to_bits()) << 16);
    let values: Vec<f32> = halves.iter().map(widened).collect();
    let source = Source::Bf16(rigs[0].buffer(&halves));
    for case in cases() {
        // Along a row the values of a block lie close together, down a column far apart.
        let shapes = [Shape::new(64, 1024), Shape::new(512, 128)];
        for shape in shapes.into_iter().take(if case.brief { 1 } else { 2 }) {
            let known: &[f32] = if case.brief { &[0.003] } else { &[1.0, 0.003] };
            for &value in known {
                check(rigs, &case, shape, &source, &values, value);
            }
        }
    }
}

pub fn a_million_bit_patterns<B: Backend>(rigs: &[Rig<B>]) {
    let random = Philox::new(11, 4);
    let values: Vec<f32> = (0..1 << 18)
        .flat_map(|i| random.block(i).map(f32::from_bits))
        .collect();
    let source = Source::F32(rigs[0].buffer(&values));
    for case in rigs[0].some_of(cases().into_iter().filter(|case| !case.brief), 4) {
        check(rigs, &case, Shape::new(1024, 1024), &source, &values, 1e-3);
    }
}

pub fn every_edge_of_blocks_and_vectors<B: Backend>(rigs: &[Rig<B>]) {
    for case in cases() {
        let unit = case.columns();
        let block = case.longest().unwrap_or(64);
        let rows = match case.brief {
            true => vec![block - 1, 2 * block + 1],
            false => vec![1, 2, block - 1, block, block + 1, 2 * block + 1],
        };
        let cols = if unit == 1 {
            vec![1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129]
        } else {
            vec![unit, 2 * unit, 3 * unit, 7 * unit]
        };
        for (n, &rows) in rows.iter().enumerate() {
            for &cols in &cols {
                let shape = Shape::new(rows, cols);
                let (source, values) = source(
                    &rigs[0],
                    &values(shape.elements(), n as u64, true),
                    n % 2 == 1,
                );
                check(rigs, &case, shape, &source, &values, 40.0);
            }
        }
    }
}

/// Rows so long that a tile is walked in several chunks.
pub fn every_edge_of_chunks<B: Backend>(rigs: &[Rig<B>]) {
    for (n, case) in rigs[0].some_of(cases(), 6).iter().enumerate() {
        let unit = case.columns();
        for cols in [5000, 40_000]
            .into_iter()
            .take(if case.brief { 1 } else { 2 })
        {
            let shape = Shape::new(
                if cols > 5000 { 33 } else { 130 },
                cols / unit * unit + unit,
            );
            let (source, values) = source(
                &rigs[0],
                &values(shape.elements(), n as u64, false),
                n % 2 == 1,
            );
            check(rigs, case, shape, &source, &values, 40.0);
        }
    }
}

/// The digest of the codes of f32 bit patterns, 2^22 at a time, from every `step`-th run of them.
fn digest<B: Backend>(rig: &Rig<B>, element: Code, step: usize) -> u64 {
    const RUN: usize = 1 << 22;
    let case = case(element, CURRENT, None, None);
    let buffer = rig.buffer(&vec![0f32; RUN]);
    let shape = Shape::new(RUN >> 10, 1 << 10);
    let source = Source::F32(buffer.clone());
    let outer = case.outer(shape, 1.0);
    let job = encode_job(rig, &case, &case.specs(), shape, source, &outer);
    let bytes = job.targets[0].bytes.clone();
    let plan = rig.plan(Work::Encode(vec![job])).unwrap();
    let mut digest = 0xCBF2_9CE4_8422_2325u64;
    for run in (0..1usize << 10).step_by(step) {
        let first = (run * RUN) as u32;
        let values: Vec<f32> = (0..RUN as u32).map(|i| f32::from_bits(first + i)).collect();
        rig.backend.write(&buffer, 0, &values).unwrap();
        rig.backend.run(&plan, &StepScalars::default()).unwrap();
        for word in rig.content::<u8>(&bytes).as_chunks::<8>().0 {
            digest = (digest ^ u64::from_le_bytes(*word)).wrapping_mul(0x0000_0100_0000_01B3);
            digest ^= digest >> 29;
        }
    }
    digest
}

/// Digests of the codes of all 2^32 bit patterns with `LOWP_EXHAUSTIVE=1`, otherwise of every 41st
/// run of 2^22: one table, whatever the device and the instruction set.
pub fn digests_of_all_bit_patterns<B: Backend>(rigs: &[Rig<B>]) {
    let whole = std::env::var_os("LOWP_EXHAUSTIVE").is_some_and(|v| v == "1");
    let (step, expected) = if whole {
        let all = [
            0xb563_0f42_6229_c72b,
            0x22c8_dba9_9384_925c,
            0x02d3_ebc1_f756_ee15,
        ];
        (1, all)
    } else {
        let some = [
            0x3fbb_3910_7e5c_8262,
            0xdeb9_ddf9_ab11_5e9f,
            0x11f6_1f8b_f00c_bd6f,
        ];
        (41, some)
    };
    let codes = [Code::E4M3, Code::E5M2, Code::E2M1];
    for rig in rigs {
        let found = codes.map(|code| digest(rig, code, step));
        assert_eq!(found, expected, "{rig:?}");
    }
}
