//! A checked expression: the tree that the evaluator walks.

use regex::Regex;

use super::functions::Function;
use super::value::{Key, Value};

/// A checked expression. Variables are numbered by their nesting.
#[derive(Debug)]
pub(super) enum Node {
    Literal(Value),
    Device,
    Variable(usize),
    Select {
        operand: Box<Node>,
        field: Field,
        test: Test,
    },
    And(Box<Node>, Box<Node>),
    Or(Box<Node>, Box<Node>),
    List(Vec<Item>),
    Map(Vec<(Node, Item)>),
    Call(Function, Vec<Node>),
    /// A search for a pattern that is known when the expression is compiled.
    Pattern {
        function: Function,
        text: Box<Node>,
        pattern: Regex,
        limit: Option<Box<Node>>,
    },
    Loop {
        range: Box<Node>,
        body: Loop,
    },
    Bind {
        value: Box<Node>,
        body: Box<Node>,
    },
    /// `optMap` and, if `is_flat`, `optFlatMap`.
    MapOptional {
        optional: Box<Node>,
        body: Box<Node>,
        is_flat: bool,
    },
}

/// A field and the key that it is in a map.
#[derive(Debug)]
pub(super) struct Field(pub(super) Key);

/// Result of the selection of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Test {
    /// The field's value.
    Value,
    /// True if the field is present: `has(a.b)`.
    Presence,
    /// An optional: `a.?b`.
    Optional,
}

/// An element of a list literal, or a value of a map literal.
#[derive(Debug)]
pub(super) struct Item {
    pub(super) node: Node,
    /// True if the node is an optional, which is omitted if it has no value.
    pub(super) is_optional: bool,
}

/// A macro over the elements of a list or the keys of a map; its nodes see the element as a variable.
#[derive(Debug)]
pub(super) enum Loop {
    All(Box<Node>),
    Exists(Box<Node>),
    ExistsOne(Box<Node>),
    Filter(Box<Node>),
    Map {
        predicate: Option<Box<Node>>,
        transform: Box<Node>,
    },
}
