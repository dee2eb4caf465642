//! Declarations that host and device share: each macro makes the Rust items and their text in C++.

use std::fmt::Write;

/// A type of a field, and what the device calls it.
pub(crate) trait Shared {
    /// The C++ type; of an array that of its elements.
    const NAME: &'static str;
    /// What follows the field's name.
    fn suffix() -> String {
        String::new()
    }
}

macro_rules! numbers {
    ($($Type:ty, $name:literal;)+) => {
        $(impl Shared for $Type {
            const NAME: &'static str = $name;
        })+
    };
}

numbers! {
    u8, "uint8_t";
    u32, "uint32_t";
    u64, "uint64_t";
    i32, "int";
    f32, "float";
    f64, "double";
}

impl<T: Shared, const N: usize> Shared for [T; N] {
    const NAME: &'static str = T::NAME;
    fn suffix() -> String {
        format!("[{N}]{}", T::suffix())
    }
}

/// A field of a struct.
pub(crate) struct Field {
    pub(crate) name: &'static str,
    pub(crate) docs: &'static [&'static str],
    pub(crate) kind: &'static str,
    /// What follows the name.
    pub(crate) suffix: String,
}

fn comment(text: &mut String, indent: &str, docs: &[&str]) {
    for line in docs {
        // Writing to a String does not fail.
        let _ = writeln!(text, "{indent}//{line}");
    }
}

/// A struct. The macro made sure that it has no implicit padding: where the device agrees on the size, it
/// has none there either, and every field lies where it lies here.
pub(crate) fn structure(name: &str, docs: &[&str], size: usize, fields: &[Field]) -> String {
    let mut text = String::from("\n");
    comment(&mut text, "", docs);
    let _ = write!(text, "struct {name} {{");
    let mut before = None;
    for field in fields {
        let Field {
            name,
            kind,
            suffix,
            docs,
        } = field;
        if docs.is_empty() && before == Some(kind) {
            let _ = write!(text, ", {name}{suffix}");
        } else {
            text.push_str(if text.ends_with('{') { "\n" } else { ";\n" });
            comment(&mut text, "  ", docs);
            let _ = write!(text, "  {kind} {name}{suffix}");
        }
        // A comment is about one field.
        before = docs.is_empty().then_some(kind);
    }
    let _ = writeln!(text, ";\n}};\nstatic_assert(sizeof({name}) == {size});");
    text
}

/// A value of an enumeration.
pub(crate) struct Value {
    pub(crate) name: &'static str,
    pub(crate) docs: &'static [&'static str],
    pub(crate) value: u32,
}

/// An enumeration whose values begin with `prefix`.
pub(crate) fn enumeration(
    name: &str,
    kind: &str,
    prefix: &str,
    docs: &[&str],
    values: &[Value],
) -> String {
    let mut text = String::from("\n");
    comment(&mut text, "", docs);
    let _ = writeln!(text, "enum {name} : {kind} {{");
    for value in values {
        comment(&mut text, "  ", value.docs);
        let _ = writeln!(text, "  {prefix}{} = {},", value.name, value.value);
    }
    text.push_str("};\n");
    text
}

/// A constant.
pub(crate) fn constant(name: &str, kind: &str, docs: &[&str], value: i64) -> String {
    let mut text = String::new();
    comment(&mut text, "", docs);
    let _ = writeln!(text, "constexpr {kind} {name} = {value};");
    text
}

/// Plain structs without implicit padding, and `structs`, which declares them for the device.
macro_rules! structs {
    ($(
        $(#[doc = $doc:literal])*
        struct $Name:ident {
            $($(#[doc = $field_doc:literal])* $field:ident: $Type:ty,)+
        }
    )+) => {
        $(
            $(#[doc = $doc])*
            #[derive(Clone, Copy, Debug, Default, PartialEq)]
            #[repr(C)]
            pub(crate) struct $Name {
                $($(#[doc = $field_doc])* pub(crate) $field: $Type,)+
            }

            impl Shared for $Name {
                const NAME: &'static str = stringify!($Name);
            }

            const _: () = assert!(
                size_of::<$Name>() == 0 $(+ size_of::<$Type>())+,
                concat!(stringify!($Name), " has implicit padding; add a `reserved` field"),
            );
        )+

        /// The structs in C++.
        pub(super) fn structs() -> String {
            [$(structure(
                stringify!($Name),
                &[$($doc),*],
                size_of::<$Name>(),
                &[$(Field {
                    name: stringify!($field),
                    docs: &[$($field_doc),*],
                    kind: <$Type as Shared>::NAME,
                    suffix: <$Type as Shared>::suffix(),
                }),+],
            )),+].concat()
        }
    };
}

/// Modules of values, and `values`, which declares each as an enumeration for the device.
macro_rules! values {
    ($(
        $(#[doc = $doc:literal])*
        mod $module:ident: $Type:ty as $Name:ident, $prefix:literal {
            $($(#[doc = $value_doc:literal])* $value:ident = $number:literal,)+
        }
    )+) => {
        $(
            $(#[doc = $doc])*
            pub(crate) mod $module {
                $($(#[doc = $value_doc])* pub(crate) const $value: $Type = $number;)+
            }
        )+

        /// The enumerations in C++.
        pub(super) fn values() -> String {
            [$(enumeration(
                stringify!($Name),
                <$Type as Shared>::NAME,
                $prefix,
                &[$($doc),*],
                &[$(Value {
                    name: stringify!($value),
                    docs: &[$($value_doc),*],
                    value: $number,
                }),+],
            )),+].concat()
        }
    };
}

/// Constants, and `constants`, which declares them for the device.
macro_rules! constants {
    ($($(#[doc = $doc:literal])* $NAME:ident: $Type:ty = $number:literal;)+) => {
        $($(#[doc = $doc])* pub(crate) const $NAME: $Type = $number;)+

        /// The constants in C++.
        pub(super) fn constants() -> String {
            [$(constant(
                stringify!($NAME),
                <$Type as Shared>::NAME,
                &[$($doc),*],
                $number,
            )),+].concat()
        }
    };
}

pub(super) use {constants, structs, values};
