//! Aligned columns of text that may come from a file.

use crate::output::shown;
use lowp_format::Table;

/// Rows of cells below a header. Every row has as many cells as the header.
#[derive(Debug)]
pub(crate) struct Columns(Table);

impl Columns {
    /// A table with this header; `words` are the columns aligned to the left.
    pub(crate) fn new(header: &[&str], words: &'static [usize]) -> Self {
        Self(Table::new(header.iter().copied(), words))
    }

    /// Adds a row of the program's own words, which are shown whole.
    pub(crate) fn own_words(&mut self, cells: impl IntoIterator<Item = String>) {
        self.0.row(cells);
    }

    /// Adds a row. A cell is one line of a readable length, whatever is in it.
    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let shown = |cell: String| shown(&cell).to_string();
        self.0.row(cells.into_iter().map(shown));
    }

    /// One line per row.
    pub(crate) fn render(&self) -> String {
        self.0.to_string()
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
    fn own_words_are_shown_whole() {
        let mut table = Columns::new(&["what", "remedy"], &[0, 1]);
        let remedy = "a recipe, ".repeat(40) + "or another";
        table.own_words(["a".to_owned(), remedy.clone()]);
        assert!(table.render().ends_with(&format!("a     {remedy}\n")));
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
