//! Values of a matrix, whichever way it was saved.

use lowp_checkpoint::{Block, Checkpoint, Dtype, Piece, Saver};
use proptest::prelude::*;
use serde_json::json;

use crate::laws::{cut, shares, world};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Values of a matrix are the same, saved as it is or as one row.
    #[test]
    fn any_elements_of_any_form(rows in 1usize..6, cols in 1usize..9, ranks in 1usize..5, start: prop::sample::Index, end: prop::sample::Index) {
        let folder = tempfile::tempdir().expect("a folder");
        let len = rows * cols;
        let values: Vec<f32> = (0..len).map(|i| i as f32).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let forms = [("matrix", [rows, cols], 0), ("tiles", [rows, cols], 1), ("row", [1, len], 1)];
        let save = |rank: usize, mut saver: Saver| {
            let pieces = forms.map(|(name, full, axis)| {
                let wide = |[rows, cols]: [usize; 2]| [rows, 4 * cols];
                let block = shares(full, axis, ranks)[rank];
                let of = Block { start: wide(block.start), shape: wide(block.shape) };
                let bytes = cut(&bytes, wide(full), of);
                Piece { name: name.to_owned(), dtype: Dtype::F32, full, block, bytes }
            });
            saver.start(1, pieces.into(), json!({})).expect("a start");
            saver.finish().expect("a checkpoint");
        };
        world(ranks, save, folder.path(), None);
        let checkpoint = Checkpoint::latest(folder.path()).expect("a checkpoint");
        let start = start.index(len + 1);
        let elements = start..start + end.index(len - start + 1);
        for (name, _, _) in forms {
            let read = checkpoint.read_elements(name, [rows, cols], elements.clone());
            prop_assert_eq!(&read.expect("values"), &values[elements.clone()], "{}", name);
            for beyond in [0..len + 1, len..len + 1, 0..usize::MAX, usize::MAX - 1..usize::MAX] {
                prop_assert!(checkpoint.read_elements(name, [rows, cols], beyond).is_err());
            }
            prop_assert!(checkpoint.read_elements(name, [rows + 1, cols], 0..1).is_err());
        }
    }
}
