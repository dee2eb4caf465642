//! Parts of buffers as buffers of their own.

use proptest::prelude::*;

use super::*;
use lowp_kernels::TransposeJob;

fn bytes(count: usize, seed: u64) -> Vec<u8> {
    let random = Philox::new(seed, 3);
    (0..count as u64).map(|i| random.byte(i)).collect()
}

fn transpose<B: Backend>(entries: [usize; 2], from: B::Buffer<u8>, to: B::Buffer<u8>) -> Work<B> {
    let code = Code::E4M3;
    Work::Transpose(vec![TransposeJob {
        code,
        entries,
        from,
        to,
    }])
}

/// Views of views, at any offset, read and written by one plan: what lies between stays.
pub fn a_plan_works_on_parts_of_one_memory<B: Backend>(rig: &Rig<B>) {
    let config = cases_of(64);
    proptest!(config, |(
        outer in 1usize..70, inner in 1usize..70, gaps in [0usize..40, 0usize..40, 0usize..40],
        backwards: bool, seed: u64,
    )| {
        let size = outer * inner;
        let first = gaps[0]..gaps[0] + size;
        let second = first.end + gaps[1]..first.end + gaps[1] + size;
        let before = bytes(second.end + gaps[2], seed);
        let whole = rig.buffer(&before);
        let (from, to) = if backwards { (second, first) } else { (first, second) };
        // The last of them by way of another view.
        let source = rig.backend.view::<u8>(&whole, from.clone()).unwrap();
        let rest = rig.backend.view::<u8>(&whole, to.start..before.len()).unwrap();
        let target = rig.backend.view::<u8>(&rest, 0..size).unwrap();
        prop_assert_eq!(rig.backend.len::<u8>(&target), size);
        rig.run(transpose(
            [outer, inner],
            source.clone(),
            target.clone(),
        ));
        let mut expected = before.clone();
        for i in 0..outer {
            for j in 0..inner {
                expected[to.start + j * outer + i] = before[from.start + i * inner + j];
            }
        }
        prop_assert_eq!(&rig.content::<u8>(&whole), &expected);
        prop_assert_eq!(rig.content::<u8>(&target), &expected[to.clone()]);
        rig.backend.copy::<u8>(&target, 0..size, &source, 0).unwrap();
        prop_assert_eq!(rig.content::<u8>(&source), &expected[to]);
    });
}

pub fn parts_that_overlap_alias<B: Backend>(rig: &Rig<B>) {
    let whole = rig.buffer(&[0u8; 100]);
    let view = |range| rig.backend.view::<u8>(&whole, range).unwrap();
    let aliased = |error| matches!(error, KernelError::Aliased { .. });
    for start in [0, 1, 15] {
        let error = rig.plan(transpose([4, 4], view(0..16), view(start..start + 16)));
        assert!(aliased(error.unwrap_err()));
        let error = rig
            .backend
            .copy::<u8>(&whole, 0..16, &view(start..start + 16), 0);
        assert!(aliased(error.unwrap_err()));
    }
    rig.plan(transpose([4, 4], view(0..16), view(16..32)))
        .unwrap();
    rig.backend
        .copy::<u8>(&whole, 0..16, &view(16..32), 0)
        .unwrap();
}

pub fn views_lie_within_their_buffers<B: Backend>(rig: &Rig<B>) {
    let whole = rig.buffer(&[1f32; 10]);
    let view = rig.backend.view::<f32>(&whole, 4..8).unwrap();
    for (buffer, range) in [(&whole, 4..11), (&view, 0..5), (&view, 5..5)] {
        let error = rig.backend.view::<f32>(buffer, range).unwrap_err();
        assert!(matches!(error, KernelError::Range { .. }), "{error}");
    }
    let empty = rig.backend.view::<f32>(&view, 4..4).unwrap();
    assert!(rig.content::<f32>(&empty).is_empty());
    assert!(rig.backend.span::<f32>(&empty).is_empty());
    assert!(rig.backend.read::<f32>(&view, 3, &mut [0.0; 2]).is_err());
    assert!(rig.backend.write::<f32>(&view, 4, &[0.0]).is_err());
    rig.backend.write::<f32>(&view, 1, &[2.0, 3.0]).unwrap();
    rig.backend
        .clear::<f32>(&rig.backend.view::<f32>(&view, 3..4).unwrap())
        .unwrap();
    assert_eq!(
        rig.content::<f32>(&whole),
        [1., 1., 1., 1., 1., 2., 3., 0., 1., 1.]
    );
}
