//! Just enough of the lexical structure of Rust (and CUDA) to tell code from comments, strings and
//! unit tests.

/// A source file line by line. Line `i` of either view is line `i + 1` of the file.
#[derive(Debug)]
pub(super) struct Lexed {
    /// Comments are blank.
    pub(super) code: Vec<String>,
    /// Comments and the contents of string and character literals are blank.
    pub(super) bare: Vec<String>,
}

/// Splits `source` into its views.
pub(super) fn lex(source: &str) -> Lexed {
    let mut lexer = Lexer {
        chars: source.chars().collect(),
        at: 0,
        code: String::new(),
        bare: String::new(),
    };
    while lexer.at < lexer.chars.len() {
        lexer.step();
    }
    let lines = |text: String| text.split('\n').map(str::to_owned).collect();
    Lexed {
        code: lines(lexer.code),
        bare: lines(lexer.bare),
    }
}

/// The code view without `#[cfg(test)] mod name { .. }` sections, with line numbers counted from 1.
///
/// A section ends at the first closing brace with the indentation of its attribute, as rustfmt
/// writes it.
pub(super) fn library_code(source: &str) -> Vec<(usize, String)> {
    let Lexed { code, bare } = lex(source);
    let mut kept = Vec::new();
    let mut line = 0;
    while line < code.len() {
        match test_section_end(&bare, line) {
            Some(end) => line = end + 1,
            None => {
                kept.push((line + 1, code[line].clone()));
                line += 1;
            }
        }
    }
    kept
}

/// The last line of the test section that starts at line `start`, if one does.
fn test_section_end(bare: &[String], start: usize) -> Option<usize> {
    let indent = bare[start].strip_suffix("#[cfg(test)]")?;
    if !indent.trim().is_empty() {
        return None;
    }
    // More attributes may stand between.
    let head = (start + 1..bare.len()).find(|&line| {
        let text = bare[line].trim();
        !text.is_empty() && !text.starts_with("#[")
    })?;
    let text = bare[head].trim_end();
    if !words(text).any(|word| word == "mod") || !text.ends_with('{') {
        return None;
    }
    let closing = format!("{indent}}}");
    (head + 1..bare.len()).find(|&line| bare[line].trim_end() == closing)
}

/// The identifiers and keywords in a line.
pub(super) fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(|c: char| !is_word(c))
        .filter(|word| !word.is_empty())
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

struct Lexer {
    chars: Vec<char>,
    at: usize,
    code: String,
    bare: String,
}

impl Lexer {
    fn peek(&self, ahead: usize) -> Option<char> {
        self.chars.get(self.at + ahead).copied()
    }

    /// Consumes one character. A view that hides it gets a space, so that columns and lines stay.
    fn take(&mut self, in_code: bool, in_bare: bool) {
        let c = self.chars[self.at];
        let shown = |show: bool| if show || c == '\n' { c } else { ' ' };
        self.code.push(shown(in_code));
        self.bare.push(shown(in_bare));
        self.at += 1;
    }

    /// Consumes one token that may hide text, or one character.
    fn step(&mut self) {
        match (self.chars[self.at], self.peek(1)) {
            ('/', Some('/')) => {
                while self.peek(0).is_some_and(|c| c != '\n') {
                    self.take(false, false);
                }
            }
            ('/', Some('*')) => self.block_comment(),
            ('"', _) => self.string(),
            ('r', Some('"' | '#')) if self.raw_string_start() => self.raw_string(),
            ('\'', Some('\\')) => self.escaped_char(),
            // `'x'` is a character, `'x` a lifetime.
            ('\'', Some(_)) if self.peek(2) == Some('\'') => {
                self.take(true, true);
                self.take(true, false);
                self.take(true, true);
            }
            _ => self.take(true, true),
        }
    }

    /// Block comments nest.
    fn block_comment(&mut self) {
        let mut depth = 0;
        while let Some(c) = self.peek(0) {
            match (c, self.peek(1)) {
                ('/', Some('*')) => depth += 1,
                ('*', Some('/')) => depth -= 1,
                _ => {
                    self.take(false, false);
                    continue;
                }
            }
            self.take(false, false);
            self.take(false, false);
            if depth == 0 {
                return;
            }
        }
    }

    fn string(&mut self) {
        self.take(true, true);
        while let Some(c) = self.peek(0) {
            self.take(true, c == '"');
            if c == '"' {
                return;
            }
            if c == '\\' && self.peek(0).is_some() {
                self.take(true, false);
            }
        }
    }

    /// Whether the `r` here opens a raw string: `r"`, `r#"`, also behind `b` or `c`, but not the end
    /// of a name or `r#name`.
    fn raw_string_start(&self) -> bool {
        let before = |back: usize| self.at.checked_sub(back).map(|at| self.chars[at]);
        let prefix = match before(1) {
            Some('b' | 'c') => before(2),
            other => other,
        };
        let hashes = self.chars[self.at + 1..]
            .iter()
            .take_while(|&&c| c == '#')
            .count();
        !prefix.is_some_and(is_word) && self.peek(1 + hashes) == Some('"')
    }

    fn raw_string(&mut self) {
        self.take(true, true);
        let mut hashes = 0;
        while self.peek(0) == Some('#') {
            self.take(true, true);
            hashes += 1;
        }
        self.take(true, true);
        while let Some(c) = self.peek(0) {
            let closes = c == '"' && (1..=hashes).all(|ahead| self.peek(ahead) == Some('#'));
            self.take(true, closes);
            if closes {
                return;
            }
        }
    }

    fn escaped_char(&mut self) {
        self.take(true, true);
        // The backslash and the character it escapes, which may be a quote.
        for _ in 0..2 {
            if self.peek(0).is_some() {
                self.take(true, false);
            }
        }
        while let Some(c) = self.peek(0) {
            self.take(true, c == '\'');
            if c == '\'' {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bare(source: &str) -> String {
        lex(source).bare.join("\n")
    }

    #[test]
    fn comments_are_blank_in_both_views() {
        let lexed = lex("a // b\n/* c /* d */ e */ f\n/// g\n\"//h\"");
        assert_eq!(lexed.code[0].trim(), "a");
        assert_eq!(lexed.code[1].trim(), "f");
        assert_eq!(lexed.code[2].trim(), "");
        assert_eq!(lexed.code[3], "\"//h\"");
        assert_eq!(lexed.bare[3], "\"   \"");
    }

    #[test]
    fn literals_of_every_kind_end_where_they_end() {
        for literal in [
            r#""a\"b""#,
            r##"r"a\""##,
            r###"r#"a"b"#"###,
            r#"b"a""#,
            r##"br"\""##,
            r#"'"'"#,
            r"'\''",
            r"'\\'",
            r"'\u{22}'",
        ] {
            let after = bare(&format!("{literal} end"));
            assert!(after.ends_with(" end"), "{literal}: {after}");
            assert!(!after.contains('a'), "{literal}: {after}");
        }
        assert_eq!(bare("fn f<'a>(x: &'a str)"), "fn f<'a>(x: &'a str)");
        assert_eq!(bare("r#type"), "r#type");
    }

    #[test]
    fn lines_keep_their_numbers() {
        let lexed = lex("\"a\nb\"\nc");
        assert_eq!(lexed.bare, ["\" ", " \"", "c"]);
    }

    #[test]
    fn unit_tests_are_not_library_code() {
        let source = "fn a() {}\n#[cfg(test)]\nmod tests {\n    fn b() {}\n}\nfn c() {}\n#[cfg(test)]\nmod far;\n";
        let lines: Vec<String> = library_code(source)
            .into_iter()
            .map(|(_, text)| text)
            .collect();
        assert_eq!(
            lines,
            ["fn a() {}", "fn c() {}", "#[cfg(test)]", "mod far;", ""]
        );
        assert_eq!(library_code(source)[1].0, 6);
    }

    #[test]
    fn a_brace_in_a_string_does_not_end_the_section() {
        let source =
            "#[cfg(test)]\n#[rustfmt::skip]\nmod tests {\nconst A: &str = \"\n}\n\";\n}\nfn c() {}";
        let lines: Vec<String> = library_code(source)
            .into_iter()
            .map(|(_, text)| text)
            .collect();
        assert_eq!(lines, ["fn c() {}"]);
    }
}
