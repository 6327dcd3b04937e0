//! The check of types at compile time, and the translation of the parser's tree into the evaluator's.

use std::sync::Arc;

use cel::common::ast::{
    CallExpr, EntryExpr, Expr, IdedEntryExpr, IdedExpr, ListExpr, LiteralValue, SelectExpr,
    operators,
};

use super::Steps;
use super::functions::{self, Function, Overload, TYPE_PARAMETERS_MAX};
use super::library;
use super::pattern;
use super::tree::{Field, Item, Node, Test};
use super::types::{Inference, Type};
use super::value::{Key, Map, Value};

/// Nodes within nodes, which bounds the evaluator's recursion: a chain of `+` is one node in the other.
const DEPTH_MAX: usize = 100;

/// Types within the type of a node: it can double with every variable that holds a map of another one to itself.
const TYPE_SIZE_MAX: usize = 256;

/// Patterns in an expression: the compilation of each takes up to a millisecond.
const PATTERNS_MAX: usize = 32;

/// Steps of a conversion of a literal.
const FOLD_STEPS: u64 = 10_000;

/// Problem at a node of the parser's tree.
pub(super) struct Problem {
    pub(super) node: u64,
    pub(super) text: String,
}

/// A node of the evaluator's tree and its type.
pub(super) struct Checked {
    pub(super) node: Node,
    pub(super) of: Type,
}

#[derive(Default)]
pub(super) struct Checker {
    pub(super) types: Inference,
    /// The variables of the macros around the current node.
    pub(super) variables: Vec<(String, Type)>,
    /// Types of literals' elements that must be the same in the end, with the node of the second.
    same: Vec<(Type, Type, u64)>,
    depth: usize,
    patterns: usize,
}

impl Checker {
    /// Checks an expression whose result is to be a bool.
    pub(super) fn check(mut self, tree: &IdedExpr) -> Result<Node, Problem> {
        let checked = self.node(tree)?;
        for (first, other, node) in std::mem::take(&mut self.same) {
            let (first, other) = (
                self.types.resolved(&first, true),
                self.types.resolved(&other, true),
            );
            if first != other {
                return Err(problem(
                    node,
                    format!("the elements are {first} and {other}, not of one type"),
                ));
            }
        }
        let of = self.types.resolved(&checked.of, true);
        if self.types.is_exhausted() {
            return Err(problem(tree.id, "the types are too large"));
        }
        match of {
            Type::Bool | Type::Dyn => Ok(checked.node),
            other => Err(problem(tree.id, format!("the result is {other}, not bool"))),
        }
    }

    pub(super) fn node(&mut self, expression: &IdedExpr) -> Result<Checked, Problem> {
        if self.depth >= DEPTH_MAX {
            return Err(problem(
                expression.id,
                format!("the expression is nested deeper than {DEPTH_MAX}"),
            ));
        }
        if self.types.is_exhausted() {
            return Err(problem(expression.id, "the types are too large"));
        }
        self.depth += 1;
        let checked = self.any(expression);
        self.depth -= 1;
        match checked {
            Ok(checked) if !checked.of.is_within(&mut { TYPE_SIZE_MAX }) => {
                Err(problem(expression.id, "the types are too large"))
            }
            checked => checked,
        }
    }

    fn any(&mut self, expression: &IdedExpr) -> Result<Checked, Problem> {
        let id = expression.id;
        match &expression.expr {
            Expr::Literal(literal) => {
                self::literal(literal).ok_or_else(|| problem(id, "bytes are not supported"))
            }
            Expr::Ident(name) => self.identifier(id, name),
            Expr::Select(select) => self.select(id, select),
            Expr::Call(call) => self.call(id, call),
            Expr::List(list) => self.list(list),
            Expr::Map(map) => self.map(&map.entries),
            Expr::Struct(of) => Err(problem(
                id,
                format!("undeclared reference to {:?}", of.type_name),
            )),
            Expr::Comprehension(_) | Expr::Unspecified => {
                Err(problem(id, "the expression is incomplete"))
            }
        }
    }

    fn identifier(&self, id: u64, name: &str) -> Result<Checked, Problem> {
        let global = name.strip_prefix('.');
        if global.is_none()
            && let Some(number) = self
                .variables
                .iter()
                .rposition(|(variable, _)| variable == name)
            && let Some((_, of)) = self.variables.get(number)
        {
            return Ok(Checked {
                node: Node::Variable(number),
                of: of.clone(),
            });
        }
        let name = global.unwrap_or(name);
        if name == "device" {
            return Ok(Checked {
                node: Node::Device,
                of: Type::Device,
            });
        }
        let (name, of) = functions::type_named(name)
            .ok_or_else(|| problem(id, format!("undeclared reference to {name:?}")))?;
        Ok(Checked {
            node: Node::Literal(Value::Type(name)),
            of: Type::of_type(of),
        })
    }

    fn select(&mut self, id: u64, select: &SelectExpr) -> Result<Checked, Problem> {
        self.field(id, &select.operand, &select.field, Test::Value)
    }

    /// Checks `operand.field`, `has(operand.field)` or `operand.?field`.
    pub(super) fn field(
        &mut self,
        id: u64,
        operand: &IdedExpr,
        field: &str,
        test: Test,
    ) -> Result<Checked, Problem> {
        let operand = self.node(operand)?;
        let resolved = self.types.resolved(&operand.of, false);
        let (target, is_optional) = match resolved {
            Type::Optional(of) => (*of, true),
            other => (other, false),
        };
        let of = match &target {
            Type::Map(of) => of.1.clone(),
            Type::Dyn => Type::Dyn,
            Type::Param(_) => {
                self.types.assignable(&Type::Dyn, &target);
                Type::Dyn
            }
            Type::Device => match field {
                "driver" => Type::String,
                "allowMultipleAllocations" => Type::Bool,
                "attributes" => Type::map(Type::String, Type::map(Type::String, Type::Dyn)),
                "capacity" => Type::map(Type::String, Type::map(Type::String, Type::Quantity)),
                _ => return Err(problem(id, format!("undefined field {field:?} of device"))),
            },
            other => return Err(problem(id, format!("{other} has no field {field:?}"))),
        };
        let of = match test {
            Test::Presence => Type::Bool,
            Test::Optional => Type::optional(of),
            Test::Value if is_optional => Type::optional(of),
            Test::Value => of,
        };
        let field = Field(Key::String(field.into()));
        Ok(Checked {
            node: Node::Select {
                operand: Box::new(operand.node),
                field,
                test,
            },
            of,
        })
    }

    fn call(&mut self, id: u64, call: &CallExpr) -> Result<Checked, Problem> {
        if let Some(expanded) = self.expand(id, call)? {
            return Ok(expanded);
        }
        match (call.func_name.as_str(), call.args.as_slice()) {
            (operators::OPT_SELECT, [operand, field]) => {
                let Expr::Literal(LiteralValue::String(name)) = &field.expr else {
                    return Err(problem(
                        field.id,
                        "a field of an optional selection is a name",
                    ));
                };
                return self.field(id, operand, name.inner(), Test::Optional);
            }
            (operators::LOGICAL_AND, [left, right]) => {
                let (left, right) = (self.bool(left)?, self.bool(right)?);
                return Ok(Checked {
                    node: Node::And(left, right),
                    of: Type::Bool,
                });
            }
            (operators::LOGICAL_OR, [left, right]) => {
                let (left, right) = (self.bool(left)?, self.bool(right)?);
                return Ok(Checked {
                    node: Node::Or(left, right),
                    of: Type::Bool,
                });
            }
            _ => {}
        }
        let name = call.func_name.strip_prefix('.').unwrap_or(&call.func_name);
        let mut arguments = call
            .args
            .iter()
            .map(|it| self.node(it))
            .collect::<Result<Vec<_>, _>>()?;
        // `optional.of(1)` is a function with a qualified name, not a member of a variable.
        let qualified = call
            .target
            .as_deref()
            .and_then(path)
            .map(|path| format!("{path}.{name}"));
        if let Some((function, overloads)) = qualified.as_deref().and_then(functions::find) {
            return self.resolve(id, name, function, &overloads, false, arguments);
        }
        if let Some(target) = &call.target {
            arguments.insert(0, self.node(target)?);
        }
        let (function, overloads) = functions::find(name)
            .ok_or_else(|| problem(id, format!("unknown function {name:?}")))?;
        self.resolve(
            id,
            name,
            function,
            &overloads,
            call.target.is_some(),
            arguments,
        )
    }

    /// Checks an operand that must be a bool.
    pub(super) fn bool(&mut self, expression: &IdedExpr) -> Result<Box<Node>, Problem> {
        let checked = self.node(expression)?;
        if !self.types.assignable(&checked.of, &Type::Bool) {
            let of = self.types.resolved(&checked.of, true);
            return Err(problem(expression.id, format!("expected bool, found {of}")));
        }
        Ok(Box::new(checked.node))
    }

    /// Finds the overloads that take the arguments. If several do, the result is known at run time only.
    fn resolve(
        &mut self,
        id: u64,
        name: &str,
        function: Function,
        overloads: &[Overload],
        is_member: bool,
        arguments: Vec<Checked>,
    ) -> Result<Checked, Problem> {
        let (nodes, given): (Vec<_>, Vec<_>) =
            arguments.into_iter().map(|it| (it.node, it.of)).unzip();
        let mut result: Option<Type> = None;
        for overload in overloads
            .iter()
            .filter(|overload| overload.is_member == is_member)
        {
            let base = self.types.new_parameters(TYPE_PARAMETERS_MAX);
            let taken: Vec<_> = overload
                .parameters
                .iter()
                .map(|of| of.instantiated(base))
                .collect();
            if !self.types.all_assignable(&given, &taken) {
                continue;
            }
            let of = self
                .types
                .resolved(&overload.result.instantiated(base), false);
            result = Some(match result {
                None => of,
                Some(first) if first == of => first,
                Some(_) => Type::Dyn,
            });
        }
        let of = result.ok_or_else(|| {
            let given: Vec<_> = given
                .iter()
                .map(|of| self.types.resolved(of, true).to_string())
                .collect();
            let is_ordered = given
                .iter()
                .any(|of| ["quantity", "semver"].contains(&of.as_str()))
                && ["_<_", "_<=_", "_>_", "_>=_"].contains(&name);
            let hint = if is_ordered {
                ": use compareTo, isLessThan or isGreaterThan"
            } else {
                ""
            };
            problem(
                id,
                format!("{name} does not take ({}){hint}", given.join(", ")),
            )
        })?;
        // Also if the value that is searched is an error, as in the scheduler.
        if let (Function::In, [_, Node::Literal(Value::List(values))], [_, list]) =
            (function, nodes.as_slice(), given.as_slice())
            && values.is_empty()
            && matches!(self.types.resolved(list, false), Type::List(_))
        {
            return Ok(Checked {
                node: Node::Literal(Value::Bool(false)),
                of,
            });
        }
        let node = folded(function, nodes, &of).map_err(|text| problem(id, text))?;
        self.patterns += usize::from(matches!(node, Node::Pattern { .. }));
        if self.patterns > PATTERNS_MAX {
            return Err(problem(
                id,
                format!("more than {PATTERNS_MAX} regular expressions"),
            ));
        }
        Ok(Checked { node, of })
    }

    fn list(&mut self, list: &ListExpr) -> Result<Checked, Problem> {
        let mut joined: Option<Type> = None;
        let mut first: Option<Type> = None;
        let mut items = Vec::with_capacity(list.elements.len());
        for (number, element) in list.elements.iter().enumerate() {
            let checked = self.node(element)?;
            let is_optional = list.optional_indices.contains(&number);
            let of = self.unwrapped(element.id, checked.of, is_optional)?;
            self.same_type(&mut first, &of, element.id);
            joined = Some(self.join(joined, &of, element.id)?);
            items.push(Item {
                node: checked.node,
                is_optional,
            });
        }
        let of = joined.unwrap_or_else(|| Type::Param(self.types.new_parameters(1)));
        Ok(Checked {
            node: list_node(items),
            of: Type::list(of),
        })
    }

    fn map(&mut self, entries: &[IdedEntryExpr]) -> Result<Checked, Problem> {
        let (mut keys, mut values) = (None, None);
        let (mut first_key, mut first_value) = (None, None);
        let mut items = Vec::with_capacity(entries.len());
        for entry in entries {
            let EntryExpr::MapEntry(entry) = &entry.expr else {
                return Err(problem(entry.id, "the expression is incomplete"));
            };
            let key = self.node(&entry.key)?;
            self.same_type(&mut first_key, &key.of, entry.key.id);
            keys = Some(self.join(keys, &key.of, entry.key.id)?);
            let value = self.node(&entry.value)?;
            let of = self.unwrapped(entry.value.id, value.of, entry.optional)?;
            self.same_type(&mut first_value, &of, entry.value.id);
            values = Some(self.join(values, &of, entry.value.id)?);
            items.push((
                key.node,
                Item {
                    node: value.node,
                    is_optional: entry.optional,
                },
            ));
        }
        let key = keys.unwrap_or_else(|| Type::Param(self.types.new_parameters(1)));
        let value = values.unwrap_or_else(|| Type::Param(self.types.new_parameters(1)));
        Ok(Checked {
            node: map_node(items),
            of: Type::map(key, value),
        })
    }

    /// Returns the type within the optional of an optional element.
    fn unwrapped(&mut self, id: u64, of: Type, is_optional: bool) -> Result<Type, Problem> {
        match of {
            of if !is_optional => Ok(of),
            Type::Optional(of) => Ok(*of),
            Type::Dyn => Ok(Type::Dyn),
            other => {
                let other = self.types.resolved(&other, true);
                Err(problem(id, format!("expected an optional, found {other}")))
            }
        }
    }

    fn same_type(&mut self, first: &mut Option<Type>, of: &Type, id: u64) {
        match first {
            None => *first = Some(of.clone()),
            Some(first) => self.same.push((first.clone(), of.clone(), id)),
        }
    }

    fn join(&mut self, joined: Option<Type>, of: &Type, id: u64) -> Result<Type, Problem> {
        let Some(joined) = joined else {
            return Ok(of.clone());
        };
        let before = self.types.resolved(&joined, true);
        self.types.joined(joined, of).ok_or_else(|| {
            let of = self.types.resolved(of, true);
            problem(id, format!("expected {before}, found {of}"))
        })
    }
}

pub(super) fn problem(node: u64, text: impl Into<String>) -> Problem {
    Problem {
        node,
        text: text.into(),
    }
}

fn literal(literal: &LiteralValue) -> Option<Checked> {
    let (value, of) = match literal {
        LiteralValue::Boolean(value) => (Value::Bool(*value.inner()), Type::Bool),
        LiteralValue::Double(value) => (Value::Double(*value.inner()), Type::Double),
        LiteralValue::Int(value) => (Value::Int(*value.inner()), Type::Int),
        LiteralValue::Null => (Value::Null, Type::Null),
        LiteralValue::String(value) => (Value::string(value.inner()), Type::String),
        LiteralValue::UInt(value) => (Value::Uint(*value.inner()), Type::Uint),
        LiteralValue::Bytes(_) => return None,
    };
    Some(Checked {
        node: Node::Literal(value),
        of,
    })
}

/// Returns the dotted name that an expression spells.
fn path(expression: &IdedExpr) -> Option<&str> {
    match &expression.expr {
        // No function has a name of more than two segments.
        Expr::Ident(name) => Some(name.strip_prefix('.').unwrap_or(name)),
        _ => None,
    }
}

/// A list of literals is a literal: it is built once.
fn list_node(items: Vec<Item>) -> Node {
    match items
        .iter()
        .map(|item| match &item.node {
            Node::Literal(value) if !item.is_optional => Some(value.clone()),
            _ => None,
        })
        .collect::<Option<Vec<_>>>()
    {
        Some(values) => Node::Literal(Value::list(values)),
        None => Node::List(items),
    }
}

fn map_node(items: Vec<(Node, Item)>) -> Node {
    match items
        .iter()
        .map(|(key, item)| match (key, &item.node) {
            (Node::Literal(key), Node::Literal(value)) if !item.is_optional => {
                Some((Key::of(key)?, (key.clone(), value.clone())))
            }
            _ => None,
        })
        .collect::<Option<_>>()
    {
        Some(entries) => Node::Literal(Value::Map(Arc::new(Map {
            entries,
            default: None,
        }))),
        None => Node::Map(items),
    }
}

/// Does at compile time what the scheduler's compiler does: it converts literals and compiles patterns, and refuses those that fail.
fn folded(function: Function, mut nodes: Vec<Node>, result: &Type) -> Result<Node, String> {
    use Function::{
        Find, FindAll, Matches, Sum, ToBool, ToDouble, ToDyn, ToInt, ToString, ToUint, TypeOf,
    };
    match (function, nodes.as_slice()) {
        (
            ToBool | ToDouble | ToDyn | ToInt | ToString | ToUint | TypeOf,
            [Node::Literal(value)],
        ) => library::call(function, vec![value.clone()], &mut Steps::new(FOLD_STEPS))
            .map(Node::Literal)
            .map_err(|error| error.to_string()),
        (Matches | Find | FindAll, [_, Node::Literal(Value::String(text)), ..]) => {
            let pattern = pattern::compile(text).map_err(|error| error.to_string())?;
            let limit = (nodes.len() > 2)
                .then(|| nodes.pop())
                .flatten()
                .map(Box::new);
            let text = Box::new(nodes.swap_remove(0));
            Ok(Node::Pattern {
                function,
                text,
                pattern,
                limit,
            })
        }
        (Sum, [_]) => {
            // The sum of an empty list is the zero of its type.
            nodes.push(Node::Literal(match result {
                Type::Double => Value::Double(0.0),
                Type::Uint => Value::Uint(0),
                _ => Value::Int(0),
            }));
            Ok(Node::Call(function, nodes))
        }
        _ => Ok(Node::Call(function, nodes)),
    }
}
