//! Tensors that only a device is fast enough for: one of more than 2^31 elements, so that no index is 32
//! bits wide, and one of so many tiles that they are enlarged.

use lowp_format::{Extent, Form, ScaleLayout};

use super::rig::{cpu, device};
use super::*;
use lowp_kernels::reference::amax;
use lowp_kernels::{AmaxJob, Cuda, CudaBuffer, Element, RepackJob};

/// Columns of the tensor: no power of two, so that an index that lost its upper bits meets another
/// value.
const COLS: usize = 32_800;
/// Rows after which the tensor repeats itself.
const PERIOD: usize = 64;
/// Periods of the tensor.
const REPEATS: usize = 1024;
/// The first element whose index is no `i32`.
const EDGE: usize = 1 << 31;

/// 13 GB of device memory at most, and a few seconds.
#[test]
fn more_than_two_to_the_31st_elements() {
    device::once(|rig| {
        let period: Vec<bf16> = values(PERIOD * COLS, 31, false)
            .into_iter()
            .map(bf16::from_f32)
            .collect();
        let shape = Shape::new(PERIOD * REPEATS, COLS);
        let source = repeated(rig, &period, REPEATS);
        assert!(shape.elements() > EDGE && rig.backend.len::<bf16>(&source) == shape.elements());
        amaxes(rig, shape, &source, &period);
        let lines = Some([[1, 32], [32, 1]]);
        let scale = ScaleRule::E8M0(MxScale::Te);
        for case in [
            case(Code::E4M3, scale, lines, Some(ROW_MAJOR)),
            case(Code::E4M3, CURRENT, None, Some(TRANSPOSED)),
        ] {
            encodes(
                rig,
                &case,
                &case.specs(),
                shape,
                &Source::Bf16(source.clone()),
                &period,
            );
        }
    });
}

/// Large tensors are cut into other tiles: whole ones of bfloat16 into those whose next values are on their way, and rows
/// alone into runs of elements. Sides are such that the last tiles and runs are not full. What a ring does not know, as
/// NaNs, it does again with care: `special` values are everywhere or in the first rows of the period.
#[test]
fn rings_and_streams_write_what_the_cpu_writes() {
    device::once(|rig| {
        let (cols, repeats) = (256 * 33, 96);
        let shape = Shape::new(PERIOD * repeats, cols);
        // Lines have entries of their own, which do not repeat themselves; some blocks do not end with the period.
        let repeats_itself = |key: &KernelKey| {
            let of_tensor = !matches!(key.scale.outer(), Some((Extent::Line, _)));
            let whole = |[rows, _]: [usize; 2]| PERIOD.is_multiple_of(rows);
            of_tensor && key.block.is_none_or(whole)
        };
        let mut repeating = cases();
        repeating.retain(|case| !case.brief && case.kernels().iter().all(repeats_itself));
        for (seed, special_rows) in [(33, 0), (34, 1), (35, PERIOD)] {
            let mut given = values(PERIOD * cols, seed, false);
            let special = values(special_rows * cols, seed, true);
            given[..special.len()].copy_from_slice(&special);
            let period: Vec<bf16> = given.into_iter().map(bf16::from_f32).collect();
            let whole = Source::Bf16(repeated(rig, &period, repeats));
            let wide: Vec<f32> = period.iter().map(|x| x.to_f32()).collect();
            let wide = Source::F32(repeated(rig, &wide, repeats));
            for case in &repeating {
                encodes(rig, case, &case.specs(), shape, &whole, &period);
                for usage in [Usage::ROWWISE, Usage::COLUMNWISE] {
                    let specs = case.of_usage(usage);
                    encodes(rig, case, &specs, shape, &whole, &period);
                    if seed == 33 {
                        encodes(rig, case, &specs, shape, &wide, &period);
                    }
                }
            }
        }
    });
}

/// The same kernels of rings over many steps, of every case, against the reference.
#[test]
fn wide_tiles_of_small_matrices_equal_the_reference() {
    lowp_kernels::testing::WIDE_TILES.set(true);
    device::once(|rig| {
        whole_tiles::every_ingredient_equals_the_reference(rig);
        whole_tiles::stochastic_rounding_is_keyed_by_element(rig);
        round::values_are_those_of_codes(rig);
    });
}

/// Rows alone that end inside a tile are encoded in the order of memory.
#[test]
fn streams_of_bf16_write_what_the_cpu_writes() {
    device::once(|rig| {
        let (cols, repeats) = (64 * 17 + 32, 16);
        let shape = Shape::new(PERIOD * repeats, cols);
        let period: Vec<bf16> = values(PERIOD * cols, 36, false)
            .into_iter()
            .map(bf16::from_f32)
            .collect();
        let source = Source::Bf16(repeated(rig, &period, repeats));
        for scale in [
            CURRENT,
            ScaleRule::E8M0(MxScale::Te),
            ScaleRule::E8M0(MxScale::OcpFloor),
        ] {
            let blocks = (scale != CURRENT).then_some([[1, 32], [32, 1]]);
            let case = case(Code::E4M3, scale, blocks, Some(ROW_MAJOR));
            let specs = case.of_usage(Usage::ROWWISE);
            encodes(rig, &case, &specs, shape, &source, &period);
        }
    });
}

/// Enough tiles to be enlarged, with edges in both directions: swizzled scales are written from tiles of
/// other sides than Compact ones, and the bytes are the same.
#[test]
fn enlarged_tiles_write_every_form_alike() {
    device::once(|rig| {
        let (period, cols, repeats) = (40, 16_416, 205);
        let shape = Shape::new(period * repeats, cols);
        let values = values(period * cols, 32, false).into_iter();
        let values: Vec<bf16> = values.map(bf16::from_f32).collect();
        let source = Source::Bf16(repeated(rig, &values, repeats));
        let scale = ScaleRule::E8M0(MxScale::Te);
        for (blocks, axes) in [([[1, 32], [32, 1]], Some(ROW_MAJOR)), ([[32, 32]; 2], None)] {
            let case = case(Code::E4M3, scale, Some(blocks), axes).padded();
            let job = |targets: Vec<Target<Cuda>>| EncodeJob {
                shape,
                kernels: case.kernels(),
                source: source.clone(),
                source_rounding: SourceRounding::F32,
                tensor: [None, None],
                targets,
                stochastic: None,
            };
            let compact = || -> Vec<Target<Cuda>> {
                let bytes = |spec: &BufferSpec| rig.backend.alloc(spec.bytes(shape)).unwrap();
                let target = |spec: &BufferSpec| Target::new(*spec, bytes(spec));
                case.specs().iter().map(target).collect()
            };
            let (alone, beside) = (compact(), compact());
            rig.run(Work::Encode(vec![job(alone.clone())]));
            let mut forms = Vec::new();
            for target in &alone {
                if target.spec.key.part != Part::BlockScale {
                    continue;
                }
                for orientation in target.spec.key.usage.orientations() {
                    let (spec, form) = (target.spec, Form::Swizzled);
                    let to_layout = ScaleLayout::new(&spec, shape, orientation, form).unwrap();
                    let buffer = || rig.buffer(&vec![0xA5u8; to_layout.bytes()]);
                    let to = buffer();
                    rig.run(Work::Repack(vec![RepackJob {
                        from_layout: target.layout(shape).unwrap(),
                        to_layout,
                        from: target.bytes.clone(),
                        to: to.clone(),
                    }]));
                    forms.push((Target::in_form(spec, form, orientation, buffer()), to));
                }
            }
            let targets = forms.iter().map(|(target, _)| target.clone());
            rig.run(Work::Encode(vec![job(targets
                .chain(beside.iter().cloned())
                .collect())]));
            let pairs = alone.iter().map(|target| &target.bytes).zip(&beside);
            for (expected, target) in pairs.chain(forms.iter().map(|(target, to)| (to, target))) {
                let [found, expected] = [&target.bytes, expected].map(|b| rig.content::<u8>(b));
                let at = found.iter().zip(&expected).position(|(a, b)| a != b);
                assert_eq!(at, None, "{:?} {:?}", target.spec, target.form);
            }
        }
    });
}

/// `period`, `repeats` times, on the device.
fn repeated<T: Element>(rig: &Rig<Cuda>, period: &[T], repeats: usize) -> CudaBuffer<T> {
    let len = period.len();
    let one = rig.buffer(period);
    let all = rig.backend.alloc::<T>(len * repeats).unwrap();
    for start in (0..repeats).map(|n| n * len) {
        rig.backend.copy::<T>(&one, 0..len, &all, start).unwrap();
    }
    all
}

/// The amax is found wherever it lies.
fn amaxes(rig: &Rig<Cuda>, shape: Shape, source: &CudaBuffer<bf16>, period: &[bf16]) {
    let found = || {
        let out = rig.buffer(&[0f32]);
        rig.run(Work::Amax(vec![AmaxJob {
            shape,
            start: 0,
            source: Source::Bf16(source.clone()),
            source_rounding: SourceRounding::F32,
            out: out.clone(),
            tensor: Some(0),
            blocks: vec![],
            hadamard: false,
        }]));
        rig.content::<f32>(&out)[0]
    };
    assert_eq!(found(), amax(period.iter().map(|x| x.to_f32())));
    let peak = bf16::from_f32(2f32.powi(100));
    for at in [0, EDGE - 1, EDGE, shape.elements() - 1] {
        rig.backend.write(source, at, &[-peak]).unwrap();
        assert_eq!(found(), peak.to_f32(), "element {at}");
        let value = period[at % period.len()];
        rig.backend.write(source, at, &[value]).unwrap();
    }
}

/// Every byte is that of one period on the CPU.
fn encodes(
    rig: &Rig<Cuda>,
    case: &Case,
    specs: &[BufferSpec],
    shape: Shape,
    source: &Source<Cuda>,
    period: &[bf16],
) {
    let cpu = cpu::best();
    let small = Source::Bf16(cpu.buffer(period));
    let part = shape.with_rows(PERIOD);
    let outer = case.outer(part, 3.75);
    let small = encode_job(&cpu, case, specs, part, small, &outer);
    cpu.run(Work::Encode(vec![small.clone()]));
    let target =
        |spec: &BufferSpec| Target::new(*spec, rig.backend.alloc::<u8>(spec.bytes(shape)).unwrap());
    let large = EncodeJob {
        shape,
        kernels: case.kernels(),
        source: source.clone(),
        source_rounding: SourceRounding::F32,
        tensor: inputs(rig, case, &outer, |_, slot| TensorInput::Known(slot)),
        targets: specs.iter().map(target).collect(),
        stochastic: None,
    };
    rig.run(Work::Encode(vec![large.clone()]));
    for (small, large) in small.targets.iter().zip(&large.targets) {
        let expected = cpu.content::<u8>(&small.bytes);
        let found = rig.content::<u8>(&large.bytes);
        if small.spec.key.part.is_outer() {
            assert_eq!(found, expected);
            continue;
        }
        // Transposed, each line repeats itself; else the whole does.
        let lines = if small.spec.axes == TRANSPOSED {
            shape.cols.div_ceil(small.spec.tile[0])
        } else {
            1
        };
        let line = expected.len() / lines;
        let repeats = shape.rows / PERIOD;
        assert_eq!(found.len(), expected.len() * repeats);
        let differs =
            |(i, found): &(usize, &[u8])| *found != &expected[i / repeats * line..][..line];
        let first = found.chunks_exact(line).enumerate().find(differs);
        let at = first.map(|(i, _)| i * line);
        let (spec, kernels) = (&small.spec, case.kernels());
        let found = at.map(|at| {
            (
                &found[at..][..line.min(64)],
                &expected[at / line / repeats * line..][..line.min(64)],
            )
        });
        assert_eq!(
            found, None,
            "{spec:?} of {kernels:?}: {line} bytes from {at:?}; {source:?}"
        );
    }
}
