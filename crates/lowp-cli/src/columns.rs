//! Aligned columns of text: words to the left, numbers to the right.

use crate::output::shown;

/// Rows of cells below a header. Every row has as many cells as the header.
#[derive(Debug)]
pub(crate) struct Columns {
    rows: Vec<Vec<String>>,
    /// Columns of words; the others are aligned to the right.
    words: &'static [usize],
}

impl Columns {
    /// A table with this header; `words` are the columns aligned to the left.
    pub(crate) fn new(header: &[&str], words: &'static [usize]) -> Self {
        let header = header.iter().map(|&cell| cell.to_owned()).collect();
        Self {
            rows: vec![header],
            words,
        }
    }

    /// Adds a row. A cell is one line of a readable length, whatever is in it.
    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let cells = cells.into_iter().map(|cell| shown(&cell).to_string());
        self.rows.push(cells.collect());
    }

    /// One line per row.
    pub(crate) fn render(&self) -> String {
        let columns = self.rows.first().map_or(0, Vec::len);
        let width = |col: usize| self.rows.iter().map(|row| row[col].chars().count()).max();
        let widths: Vec<usize> = (0..columns).filter_map(width).collect();
        let mut out = String::new();
        for row in &self.rows {
            let mut line = String::new();
            for (col, (cell, &width)) in row.iter().zip(&widths).enumerate() {
                // The width of a format string has 16 bits.
                let space = " ".repeat(width - cell.chars().count());
                if self.words.contains(&col) {
                    line.extend([cell, space.as_str(), "  "]);
                } else {
                    line.extend([space.as_str(), cell, "  "]);
                }
            }
            out.push_str(line.trim_end());
            out.push('\n');
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_left_numbers_right_nothing_trailing() {
        let mut table = Columns::new(&["name", "n"], &[0]);
        table.row(["a".to_owned(), "1".to_owned()]);
        table.row(["longer".to_owned(), "100".to_owned()]);
        assert_eq!(table.render(), "name      n\na         1\nlonger  100\n");
    }

    #[test]
    fn cells_of_any_length() {
        let mut table = Columns::new(&["name", "n"], &[0]);
        table.row(["a".repeat(1 << 20), "1x".repeat(1 << 16)]);
        table.row(["b".to_owned(), "1".to_owned()]);
        let lines: Vec<usize> = table.render().lines().map(str::len).collect();
        assert_eq!((lines[0], lines[1], lines.len()), (lines[1], lines[2], 3));
        assert!(lines[0] < 400, "{lines:?}");
    }
}
