//! Places in a manifest: the field that is not of its type, and its line in the file.

use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeOwned, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use serde_path_to_error::Segment;
use serde_saphyr::Spanned;

/// A field of an object, and its line if the text of the object is known.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Place {
    field: Vec<Step>,
    line: Option<u64>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Step {
    Key(String),
    Item(usize),
}

/// `line 14, field spec.containers[0].name`.
impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(line) = self.line {
            write!(f, "line {line}")?;
        }
        if self.field.is_empty() {
            return match self.line {
                Some(_) => Ok(()),
                None => f.write_str("the object"),
            };
        }
        let space = if self.line.is_some() { ", " } else { "" };
        write!(f, "{space}field ")?;
        for (number, step) in self.field.iter().enumerate() {
            match step {
                Step::Key(key) if number == 0 => f.write_str(key)?,
                Step::Key(key) => write!(f, ".{key}")?,
                Step::Item(index) => write!(f, "[{index}]")?,
            }
        }
        Ok(())
    }
}

impl Place {
    /// Reads an object as a `T`, or returns the field at which it is none, with the error.
    pub(super) fn read<T: DeserializeOwned>(
        object: &Value,
    ) -> Result<T, (Self, serde_json::Error)> {
        serde_path_to_error::deserialize(object).map_err(|error| {
            let steps = error.path().iter().filter_map(|segment| match segment {
                Segment::Seq { index } => Some(Step::Item(*index)),
                Segment::Map { key } => Some(Step::Key(key.clone())),
                Segment::Enum { .. } | Segment::Unknown => None,
            });
            let field = steps.collect();
            (Self { field, line: None }, error.into_inner())
        })
    }

    /// Returns the same of an object that is an item of a list.
    pub(super) fn in_item(mut self, index: usize) -> Self {
        let steps = [Step::Key("items".to_owned()), Step::Item(index)];
        self.field.splice(0..0, steps);
        self
    }

    /// Returns the same with its line in a text; `document` counts from 1.
    pub(super) fn in_text(mut self, text: &str, document: usize) -> Self {
        // no error: the text was read before, and a place without a line is one
        let documents: Vec<Located> = serde_saphyr::from_multiple(text).unwrap_or_default();
        let document = document.checked_sub(1).and_then(|at| documents.get(at));
        self.line = document.map(|document| document.line_of(&self.field));
        self
    }
}

/// The lines of a value and of what is in it.
struct Located {
    line: u64,
    content: Content,
}

enum Content {
    Map(Vec<(String, Located)>),
    List(Vec<Located>),
    Leaf,
}

impl Located {
    /// The line of a field, or of the innermost value on the way to it that is there.
    fn line_of(&self, field: &[Step]) -> u64 {
        let Some((step, rest)) = field.split_first() else {
            return self.line;
        };
        let inner = match (&self.content, step) {
            (Content::Map(entries), Step::Key(key)) => entries
                .iter()
                .find(|(known, _)| known == key)
                .map(|(_, value)| value),
            (Content::List(items), Step::Item(index)) => items.get(*index),
            _ => None,
        };
        inner.map_or(self.line, |inner| inner.line_of(rest))
    }
}

impl<'de> Deserialize<'de> for Located {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let spanned = Spanned::<Content>::deserialize(deserializer)?;
        Ok(Self {
            line: spanned.referenced.line(),
            content: spanned.value,
        })
    }
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ContentVisitor)
    }
}

struct ContentVisitor;

impl<'de> Visitor<'de> for ContentVisitor {
    type Value = Content;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Content, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = map.next_entry()? {
            entries.push(entry);
        }
        Ok(Content::Map(entries))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Content, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = list.next_element()? {
            items.push(item);
        }
        Ok(Content::List(items))
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Content, D::Error> {
        Content::deserialize(deserializer)
    }

    fn visit_bool<E: serde::de::Error>(self, _: bool) -> Result<Content, E> {
        Ok(Content::Leaf)
    }

    fn visit_i64<E: serde::de::Error>(self, _: i64) -> Result<Content, E> {
        Ok(Content::Leaf)
    }

    fn visit_u64<E: serde::de::Error>(self, _: u64) -> Result<Content, E> {
        Ok(Content::Leaf)
    }

    fn visit_f64<E: serde::de::Error>(self, _: f64) -> Result<Content, E> {
        Ok(Content::Leaf)
    }

    fn visit_str<E: serde::de::Error>(self, _: &str) -> Result<Content, E> {
        Ok(Content::Leaf)
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<Content, E> {
        Ok(Content::Leaf)
    }

    fn visit_none<E: serde::de::Error>(self) -> Result<Content, E> {
        Ok(Content::Leaf)
    }
}
