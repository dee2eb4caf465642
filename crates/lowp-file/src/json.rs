//! [`JsonObject`]: the JSON object in somebody else's file, kept as text, so that what is not changed stays as it was written: numbers,
//! their order, `NaN` and `Infinity` of Python.

use crate::header::Entries;
use serde::Serialize;
use serde::de::IgnoredAny;
use serde_json::Value;
use serde_json::ser::{PrettyFormatter, Serializer};
use serde_json::value::RawValue;
use std::ops::Range;

/// What Python writes for numbers that JSON does not have.
const WORDS: [&[u8]; 3] = [b"-Infinity", b"Infinity", b"NaN"];

/// A JSON object as text.
#[derive(Clone, Debug)]
pub struct JsonObject {
    text: String,
    members: Vec<Member>,
}

#[derive(Clone, Debug)]
struct Member {
    key: String,
    /// From the quotes of the key to the end of the value.
    place: Range<usize>,
    value: Range<usize>,
}

impl JsonObject {
    /// The object that `bytes` are.
    ///
    /// # Errors
    /// No Unicode, no JSON, or another value.
    pub fn parse(bytes: Vec<u8>) -> Result<Self, String> {
        let text = String::from_utf8(bytes).map_err(|_| "it is no Unicode text".to_owned())?;
        let plain = without_words(text.clone().into_bytes());
        serde_json::from_slice::<IgnoredAny>(&plain).map_err(|e| format!("it is no JSON: {e}"))?;
        if plain.iter().find(|byte| !byte.is_ascii_whitespace()) != Some(&b'{') {
            return Err("it is not a JSON object".to_owned());
        }
        let members = members(&plain).map_err(|e| format!("it is no JSON: {e}"))?;
        Ok(Self { text, members })
    }

    /// The value of `key`, the last one if there are several, with 0 for `NaN` and `Infinity`.
    ///
    /// # Errors
    /// A value that cannot be held: a number out of the range of f64, or lists too deep.
    pub fn get(&self, key: &str) -> Result<Option<Value>, String> {
        let found = self.members.iter().rfind(|member| member.key == key);
        let value = found.map(|member| {
            let text = self.text[member.value.clone()].as_bytes().to_vec();
            from_python(text).map_err(|e| format!("its {key}: {e}"))
        });
        value.transpose()
    }

    /// The object without `key`. The rest of the text stays as it is, and all of it does if it could not be read again.
    pub fn without(&self, key: &str) -> Self {
        let (Some(first), Some(last)) = (self.members.first(), self.members.last()) else {
            return self.clone();
        };
        let mut text = self.text[..first.place.start].to_owned();
        let mut is_first = true;
        for (at, member) in self.members.iter().enumerate() {
            if member.key == key {
                continue;
            }
            // With what stands between it and the one before.
            let from = match at.checked_sub(1) {
                Some(before) if !is_first => self.members[before].place.end,
                _ => member.place.start,
            };
            text.push_str(&self.text[from..member.place.end]);
            is_first = false;
        }
        text.push_str(&self.text[last.place.end..]);
        match members(&without_words(text.clone().into_bytes())) {
            Ok(members) => Self { text, members },
            Err(_) => self.clone(),
        }
    }

    /// The object with `value` as that of `key`, after all others and indented as they are.
    pub fn with(&self, key: &str, value: &Value) -> Self {
        let mut left = self.without(key);
        let open = left.text.find('{').map_or(0, |at| at + 1);
        let first = left.members.first().map(|member| member.place.start);
        let indent = match first {
            None => Some("  "),
            Some(first) => {
                let space = &left.text[open..first];
                space.rfind('\n').map(|line| &space[line + 1..])
            }
        };
        let key = Value::from(key);
        let added = match indent {
            None => format!("{key}: {}", printed(value, None)),
            Some(indent) => {
                let value = printed(value, Some(indent)).replace('\n', &format!("\n{indent}"));
                format!("\n{indent}{key}: {value}")
            }
        };
        match left.members.last().map(|member| member.place.end) {
            Some(end) => {
                let comma = if indent.is_some() { "," } else { ", " };
                left.text.insert_str(end, &format!("{comma}{added}"));
            }
            None => {
                let close = left.text.rfind('}').unwrap_or(left.text.len());
                left.text.replace_range(open..close, &format!("{added}\n"));
            }
        }
        match members(&without_words(left.text.clone().into_bytes())) {
            Ok(members) => Self { members, ..left },
            Err(_) => self.clone(),
        }
    }

    /// The text.
    pub fn text(&self) -> &str {
        &self.text
    }
}

impl From<&serde_json::Map<String, Value>> for JsonObject {
    fn from(object: &serde_json::Map<String, Value>) -> Self {
        let text = printed(&Value::Object(object.clone()), Some("  ")) + "\n";
        let members = members(text.as_bytes()).unwrap_or_default();
        Self { text, members }
    }
}

pub(crate) fn json_text(value: &Value) -> serde_json::Result<String> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}

/// A value as text, in lines of `indent` if there is one.
fn printed(value: &Value, indent: Option<&str>) -> String {
    let Some(indent) = indent else {
        return value.to_string();
    };
    let mut text = Vec::new();
    let pretty = PrettyFormatter::with_indent(indent.as_bytes());
    let done = value.serialize(&mut Serializer::with_formatter(&mut text, pretty));
    match (done, String::from_utf8(text)) {
        (Ok(()), Ok(text)) => text,
        _ => value.to_string(),
    }
}

/// The JSON value in `text`, with 0 for `NaN`, `Infinity` and `-Infinity` of Python.
///
/// # Errors
/// It is no JSON.
pub fn from_python(text: Vec<u8>) -> serde_json::Result<Value> {
    serde_json::from_slice(&without_words(text))
}

/// `text` with a number of JSON as long, 0, in the place of every `NaN`, `Infinity` and `-Infinity`: all other bytes are where
/// they were.
fn without_words(mut text: Vec<u8>) -> Vec<u8> {
    let (mut at, mut in_string) = (0, false);
    while at < text.len() {
        match text[at] {
            b'"' => in_string = !in_string,
            b'\\' if in_string => at += 1,
            b'-' | b'I' | b'N' if !in_string => {
                let word = WORDS.iter().find(|word| text[at..].starts_with(word));
                let is_end =
                    |byte: Option<&u8>| byte.is_none_or(|byte| b"[]{},: \t\r\n".contains(byte));
                let whole = word.filter(|word| {
                    let before = at.checked_sub(1).and_then(|before| text.get(before));
                    is_end(before) && is_end(text.get(at + word.len()))
                });
                if let Some(word) = whole {
                    let (end, digits) = (at + word.len(), at + usize::from(text[at] == b'-'));
                    text[digits..end].fill(b'0');
                    text[digits + 1] = b'.';
                    at = end - 1;
                }
            }
            _ => {}
        }
        at += 1;
    }
    text
}

/// The members of the object that `text`, which is JSON, has.
fn members(text: &[u8]) -> serde_json::Result<Vec<Member>> {
    let place = |part: &RawValue| {
        let start = part.get().as_ptr().addr() - text.as_ptr().addr();
        start..start + part.get().len()
    };
    let Entries(members) = serde_json::from_slice::<Entries<&RawValue, &RawValue>>(text)?;
    let member = |(key, value): (&RawValue, &RawValue)| {
        Ok(Member {
            key: serde_json::from_str(key.get())?,
            place: place(key).start..place(value).end,
            value: place(value),
        })
    };
    members.into_iter().map(member).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn object(text: &str) -> JsonObject {
        JsonObject::parse(text.as_bytes().to_vec()).expect(text)
    }

    const FOREIGN: &str = r#"{
  "z": 1e-05,
  "time_step_limit": [0.0, Infinity],
  "quantization_config": {"x": [1, {"y": "}"}]},
  "eps": -Infinity,
  "big": 123456789012345678901234567890,
  "say \"NaN\"": NaN
}
"#;

    #[test]
    fn what_is_not_changed_stays() {
        let read = object(FOREIGN);
        assert_eq!(read.text(), FOREIGN);
        let without = FOREIGN.replace(
            "  \"quantization_config\": {\"x\": [1, {\"y\": \"}\"}]},\n",
            "",
        );
        assert_eq!(read.without("quantization_config").text(), without);
        assert_eq!(read.without("absent").text(), FOREIGN);
        let last = FOREIGN.replace(",\n  \"say \\\"NaN\\\"\": NaN", "");
        assert_eq!(read.without("say \"NaN\"").text(), last);
        let with = read.with("quantization_config", &json!({"a": [1]}));
        let added = ",\n  \"quantization_config\": {\n    \"a\": [\n      1\n    ]\n  }\n}\n";
        assert_eq!(
            with.text(),
            without.replace("NaN\n}\n", &format!("NaN{added}"))
        );
    }

    #[test]
    fn lines_are_indented_as_they_were() {
        for (text, expected) in [
            ("{}", "{\n  \"k\": 1\n}"),
            ("{\n}\n", "{\n  \"k\": 1\n}\n"),
            ("{\"a\": 2}", "{\"a\": 2, \"k\": 1}"),
            ("{\n\t\"a\": 2\n}", "{\n\t\"a\": 2,\n\t\"k\": 1\n}"),
            ("{\"k\": 7, \"a\": 2, \"k\": 8}", "{\"a\": 2, \"k\": 1}"),
            ("{\"k\": 7}", "{\n  \"k\": 1\n}"),
        ] {
            assert_eq!(object(text).with("k", &json!(1)).text(), expected);
        }
    }

    #[test]
    fn values_are_found() {
        let read = object(FOREIGN);
        assert_eq!(read.get("time_step_limit"), Ok(Some(json!([0.0, 0.0]))));
        assert_eq!(read.get("x"), Ok(None));
        assert_eq!(read.get("say \"NaN\""), Ok(Some(json!(0.0))));
        assert_eq!(
            object("{\"a\": 1, \"\\u0061\": 2}").get("a"),
            Ok(Some(json!(2)))
        );
        let huge = object("{\"a\": 1e400, \"b\": 1}");
        assert_eq!(huge.get("b"), Ok(Some(json!(1))));
        assert!(huge.get("a").expect_err("no f64").contains("its a"));
    }

    #[test]
    fn what_is_no_object_is_an_error() {
        for text in [
            "",
            "[]",
            "1",
            "NaN",
            "{",
            "{NaN: 1}",
            "{\"a\": NaNNaN}",
            "{\"a\": -NaN}",
            "{\"a\": 1NaN}",
            "{\"a\": +Infinity}",
            "{\"a\": Infinity1}",
            "{\"a\": nan}",
            "{} {}",
            "{\"a\" 1}",
            "\u{feff}{}",
        ] {
            assert!(
                JsonObject::parse(text.as_bytes().to_vec()).is_err(),
                "{text}"
            );
        }
        assert!(JsonObject::parse(b"{\"a\": \"\xff\"}".to_vec()).is_err());
    }

    fn value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            "[a-c\"\\\\{}\\[\\],: \n]{0,6}".prop_map(Value::from),
        ];
        leaf.prop_recursive(3, 24, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::btree_map("[a-d\"\\\\,:]{0,2}", inner, 0..4)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        /// A text that is edited is the text of the object that is edited.
        #[test]
        fn edits_are_those_of_the_object(
            map in prop::collection::btree_map("[a-d\"\\\\,:]{0,2}", value(), 0..5),
            key in "[a-d\"\\\\,:]{0,2}",
            new in value(),
            pretty in any::<bool>(),
        ) {
            let mut map: serde_json::Map<String, Value> = map.into_iter().collect();
            let text = if pretty {
                printed(&Value::Object(map.clone()), Some("   "))
            } else {
                Value::Object(map.clone()).to_string()
            };
            let read = object(&text);
            prop_assert_eq!(read.text(), &text);
            for (key, value) in &map {
                prop_assert_eq!(read.get(key), Ok(Some(value.clone())));
            }
            let with = read.with(&key, &new);
            map.insert(key.clone(), new);
            prop_assert_eq!(serde_json::from_str::<Value>(with.text()).expect("JSON"), Value::Object(map.clone()));
            map.remove(&key);
            let left = with.without(&key);
            prop_assert_eq!(serde_json::from_str::<Value>(left.text()).expect("JSON"), Value::Object(map.clone()));
            prop_assert_eq!(left.members.len(), map.len());
        }

    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(
            match std::env::var_os("LOWP_EXHAUSTIVE").is_some_and(|value| value == "1") {
                true => 1_000_000,
                false => 2000,
            }
        ))]

        /// Texts of every kind are an object or an error.
        #[test]
        fn any_text_is_taken_or_an_error(text in "[{}\\[\\]\",:\\\\NaInfity1e. -]{0,24}") {
            if let Ok(read) = JsonObject::parse(text.clone().into_bytes()) {
                prop_assert_eq!(read.text(), &text);
                let again = JsonObject::parse(read.with("k", &json!(1)).text().as_bytes().to_vec());
                prop_assert_eq!(again.expect("JSON").get("k"), Ok(Some(json!(1))));
            }
        }
    }
}
