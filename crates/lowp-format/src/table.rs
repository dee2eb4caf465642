//! [`Table`]: aligned columns of text, for everything that is printed.

use std::fmt;

/// Rows of cells below a header, as text: words to the left, numbers to the right.
///
/// ```
/// use lowp_format::Table;
///
/// let mut table = Table::new(["buffer", "bytes"], &[0]);
/// table.row(["rowwise_data".into(), "12288".into()]);
/// assert_eq!(table.to_string(), "buffer        bytes\nrowwise_data  12288\n");
/// ```
#[derive(Clone, Debug)]
pub struct Table {
    rows: Vec<Vec<String>>,
    words: &'static [usize],
}

impl Table {
    /// A table with this header; `words` are the columns aligned to the left.
    pub fn new<S: Into<String>>(
        header: impl IntoIterator<Item = S>,
        words: &'static [usize],
    ) -> Self {
        let header = header.into_iter().map(Into::into).collect();
        Self {
            rows: vec![header],
            words,
        }
    }

    /// Adds a row, with as many cells as the header has.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }

    /// The characters of the longest cell of each column.
    fn widths(&self) -> Vec<usize> {
        let mut widths = Vec::new();
        for row in &self.rows {
            widths.resize(widths.len().max(row.len()), 0);
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = (*width).max(cell.chars().count());
            }
        }
        widths
    }
}

/// One line per row.
impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let widths = self.widths();
        for row in &self.rows {
            let mut line = String::new();
            for (col, (cell, &width)) in row.iter().zip(&widths).enumerate() {
                // Not by a format string, whose width has 16 bits.
                let space = " ".repeat(width - cell.chars().count());
                if self.words.contains(&col) {
                    line.extend([cell, space.as_str(), "  "]);
                } else {
                    line.extend([space.as_str(), cell, "  "]);
                }
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_left_numbers_right_nothing_trailing() {
        let mut table = Table::new(["name", "n"], &[0]);
        table.row(["a".to_owned(), "1".to_owned()]);
        table.row(["größer".to_owned(), "100".to_owned()]);
        assert_eq!(table.to_string(), "name      n\na         1\ngrößer  100\n");
    }

    #[test]
    fn cells_of_any_length_and_rows_of_any_number() {
        let mut table = Table::new(["name"], &[0]);
        table.row(["a".repeat(1 << 17), "1".to_owned()]);
        table.row(Vec::new());
        let lengths: Vec<usize> = table.to_string().lines().map(str::len).collect();
        assert_eq!(lengths, [4, (1 << 17) + 3, 0]);
    }
}
