//! An audit finds every byte that a cast of the masters does not give, and nothing else.

use crate::common::{values, variants};
use lowp_format::{AnyRecipe, BufferKey, Orientation, Part, QuantizedTensor, Recipe, Shape, Usage};
use lowp_kernels::{Backend, Cpu, CpuBuffer, Source};
use lowp_shard::{Divergence, audit, quantize};

const SHAPE: Shape = Shape::new(64, 96);

type Tensor = QuantizedTensor<CpuBuffer<u8>>;

fn masters() -> CpuBuffer<f32> {
    Cpu.upload(&values(5, SHAPE.elements())).unwrap()
}

fn cast(recipe: AnyRecipe, scale: Option<f32>) -> Tensor {
    let source = Source::F32(masters());
    quantize(&Cpu, recipe, SHAPE, Usage::BOTH, source, scale).unwrap()
}

fn found(tensor: &Tensor, orientation: Orientation) -> Option<Divergence> {
    audit(&Cpu, tensor, orientation, &masters()).unwrap()
}

fn delayed() -> AnyRecipe {
    let history = |r: &AnyRecipe| r.kernel(Orientation::Rowwise).scale.is_delayed();
    AnyRecipe::all().into_iter().find(history).unwrap()
}

#[test]
fn a_cast_of_the_masters_passes() {
    for recipe in variants() {
        let tensor = cast(recipe, None);
        for orientation in Orientation::ALL {
            assert_eq!(found(&tensor, orientation), None, "{}", recipe.name());
        }
    }
}

#[test]
fn every_changed_byte_is_named() {
    for recipe in variants() {
        let is_delayed = recipe.name() == delayed().name();
        for index in 0..recipe.buffers(Usage::BOTH).len() {
            let tensor = cast(recipe, None);
            let buffer = &tensor.buffers()[index];
            let key = buffer.spec.key;
            if is_delayed && key.part.is_outer() {
                continue;
            }
            let bytes = Cpu.download(&buffer.storage).unwrap();
            for byte in [0, bytes.len() / 2, bytes.len() - 1] {
                let changed = bytes[byte] ^ 1;
                Cpu.write(&buffer.storage, byte, &[changed]).unwrap();
                for orientation in Orientation::ALL {
                    let expected = key.serves(orientation, key.part).then_some(Divergence {
                        key,
                        byte,
                        found: changed,
                        expected: bytes[byte],
                    });
                    let name = recipe.name();
                    assert_eq!(found(&tensor, orientation), expected, "{name} {key} {byte}");
                }
                Cpu.write(&buffer.storage, byte, &bytes[byte..=byte])
                    .unwrap();
            }
        }
    }
}

#[test]
fn the_message_says_where_and_what() {
    let key = BufferKey::new(Usage::ROWWISE, Part::Data);
    let divergence = Divergence {
        key,
        byte: 17,
        found: 0x0A,
        expected: 0xB0,
    };
    assert_eq!(
        divergence.to_string(),
        "rowwise_data: byte 17 is 0x0A where a cast of the masters gives 0xB0"
    );
}

/// Above 1, more than one encode scale rounds to a decode scale, and between some no scale does.
#[test]
fn a_decode_scale_that_is_no_reciprocal_is_found() {
    let reciprocal_of_none = |scale_inv: &f32| {
        let near = (1.0 / scale_inv).to_bits();
        let hits = |bits| 1.0 / f32::from_bits(bits) == *scale_inv;
        !(near - 8..=near + 8).any(hits)
    };
    let first = 1.5f32.to_bits();
    let mut candidates = (first..first + 1000).map(f32::from_bits);
    let scale_inv = candidates.find(reciprocal_of_none).expect("a gap");
    let tensor = cast(delayed(), Some(1.0 / scale_inv));
    let scale = tensor
        .part(Orientation::Rowwise, Part::DecodeScale)
        .unwrap();
    Cpu.write(&scale.storage, 0, &scale_inv.to_le_bytes())
        .unwrap();
    for orientation in Orientation::ALL {
        let divergence = found(&tensor, orientation).expect("no cast gives this scale");
        assert_eq!(divergence.key.part, Part::DecodeScale, "{divergence}");
    }
}
