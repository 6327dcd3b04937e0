//! The evaluator: walks a checked expression and takes a step for each node and each element.

use std::sync::Arc;

use super::functions::Function;
use super::library;
use super::tree::{Item, Loop, Node, Test};
use super::value::{Key, Map, Value};
use super::{EvaluationError, Steps};

type Evaluated = Result<Value, EvaluationError>;

/// Evaluates an expression whose result is to be a bool.
pub(super) fn matches(
    tree: &Node,
    device: &Value,
    steps: &mut Steps,
) -> Result<bool, EvaluationError> {
    let mut evaluator = Evaluator {
        device,
        steps,
        variables: Vec::new(),
    };
    let value = evaluator.evaluate(tree)?;
    bool(value, "the selector")
}

struct Evaluator<'a> {
    device: &'a Value,
    steps: &'a mut Steps,
    /// The values of the variables. A variable of `cel.bind` may be an error, which matters only if it is read.
    variables: Vec<Evaluated>,
}

impl Evaluator<'_> {
    fn evaluate(&mut self, node: &Node) -> Evaluated {
        self.steps.take(1)?;
        match node {
            Node::Literal(value) => Ok(value.clone()),
            Node::Device => Ok(self.device.clone()),
            Node::Variable(number) => self
                .variables
                .get(*number)
                .cloned()
                .unwrap_or_else(|| Err(no_such_key(&"variable"))),
            Node::Select {
                operand,
                field,
                test,
            } => select(&self.evaluate(operand)?, &field.0, *test, self.steps),
            Node::And(left, right) => self.logical(left, right, false),
            Node::Or(left, right) => self.logical(left, right, true),
            Node::List(items) => self.list(items),
            Node::Map(entries) => self.map(entries),
            Node::Call(function, arguments) => self.call(*function, arguments),
            Node::Pattern {
                function,
                text,
                pattern,
                limit,
            } => {
                let text = self.evaluate(text)?;
                let limit = limit
                    .as_ref()
                    .map(|limit| self.evaluate(limit))
                    .transpose()?;
                library::search(*function, &text, pattern, limit.as_ref(), self.steps)
            }
            Node::Loop { range, body } => self.run(range, body),
            Node::Bind { value, body } => {
                let value = match self.evaluate(value) {
                    Err(EvaluationError::OutOfSteps) => return Err(EvaluationError::OutOfSteps),
                    value => value,
                };
                self.with(value, body)
            }
            Node::MapOptional {
                optional,
                body,
                is_flat,
            } => match self.evaluate(optional)? {
                Value::Optional(None) => Ok(Value::Optional(None)),
                Value::Optional(Some(value)) => {
                    let result = self.with(Ok(value.as_ref().clone()), body)?;
                    Ok(if *is_flat {
                        result
                    } else {
                        Value::some(result)
                    })
                }
                _ => Err(EvaluationError::NoSuchOverload { function: "optMap" }),
            },
        }
    }

    fn with(&mut self, value: Evaluated, body: &Node) -> Evaluated {
        self.variables.push(value);
        let result = self.evaluate(body);
        self.variables.pop();
        result
    }

    /// Evaluates `&&` or `||`: one operand that decides makes an error of the other one irrelevant.
    fn logical(&mut self, left: &Node, right: &Node, deciding: bool) -> Evaluated {
        let left = self.evaluate(left).and_then(|value| bool(value, "&&, ||"));
        if left == Ok(deciding) || left == Err(EvaluationError::OutOfSteps) {
            return left.map(Value::Bool);
        }
        let right = self.evaluate(right).and_then(|value| bool(value, "&&, ||"));
        match right {
            Ok(right) if right == deciding => Ok(Value::Bool(deciding)),
            Err(EvaluationError::OutOfSteps) => Err(EvaluationError::OutOfSteps),
            right => left.and(right).map(Value::Bool),
        }
    }

    fn list(&mut self, items: &[Item]) -> Evaluated {
        let mut values = Vec::with_capacity(items.len());
        for item in items {
            values.extend(self.item(item)?);
        }
        Ok(Value::list(values))
    }

    /// Returns the value of an element; `None` for an optional without one.
    fn item(&mut self, item: &Item) -> Result<Option<Value>, EvaluationError> {
        match self.evaluate(&item.node)? {
            value if !item.is_optional => Ok(Some(value)),
            Value::Optional(value) => Ok(value.map(|value| value.as_ref().clone())),
            _ => Err(EvaluationError::NoSuchOverload { function: "?" }),
        }
    }

    fn map(&mut self, entries: &[(Node, Item)]) -> Evaluated {
        let mut map = Map::default();
        for (key, item) in entries {
            let value = self.evaluate(key)?;
            let key = Key::of(&value).ok_or(EvaluationError::NoSuchOverload {
                function: "a key of a map",
            })?;
            let Some(item) = self.item(item)? else {
                continue;
            };
            map.take_search(&key, self.steps)?;
            // The last one of two equal keys counts, as it does in cel-go.
            map.entries.insert(key, (value, item));
        }
        Ok(Value::Map(Arc::new(map)))
    }

    fn call(&mut self, function: Function, arguments: &[Node]) -> Evaluated {
        match (function, arguments) {
            (Function::Conditional, [condition, yes, no]) => {
                let condition = bool(self.evaluate(condition)?, "?:")?;
                self.evaluate(if condition { yes } else { no })
            }
            (Function::Or | Function::OrValue, [optional, other]) => {
                match self.evaluate(optional)? {
                    Value::Optional(None) => self.evaluate(other),
                    Value::Optional(Some(value)) if function == Function::OrValue => {
                        Ok(value.as_ref().clone())
                    }
                    value @ Value::Optional(_) => Ok(value),
                    _ => Err(EvaluationError::NoSuchOverload { function: "or" }),
                }
            }
            _ => {
                let mut values = Vec::with_capacity(arguments.len());
                for argument in arguments {
                    values.push(self.evaluate(argument)?);
                }
                library::call(function, values, self.steps)
            }
        }
    }

    fn run(&mut self, range: &Node, body: &Loop) -> Evaluated {
        match self.evaluate(range)? {
            Value::List(values) => self.run_over(&values, body),
            Value::Map(map) => {
                self.steps.take(map.entries.len())?;
                let keys: Vec<_> = map.entries.values().map(|(key, _)| key.clone()).collect();
                self.run_over(&keys, body)
            }
            _ => Err(EvaluationError::NoSuchOverload {
                function: "a macro",
            }),
        }
    }

    fn run_over(&mut self, elements: &[Value], body: &Loop) -> Evaluated {
        match body {
            Loop::All(predicate) => self.any(elements, predicate, false).map(Value::Bool),
            Loop::Exists(predicate) => self.any(elements, predicate, true).map(Value::Bool),
            Loop::ExistsOne(predicate) => {
                let mut count = 0_usize;
                for element in elements {
                    count += usize::from(self.holds(predicate, element)?);
                }
                Ok(Value::Bool(count == 1))
            }
            Loop::Filter(predicate) => {
                let mut kept = Vec::new();
                for element in elements {
                    if self.holds(predicate, element)? {
                        kept.push(element.clone());
                    }
                }
                Ok(Value::list(kept))
            }
            Loop::Map {
                predicate,
                transform,
            } => {
                let mut mapped = Vec::new();
                for element in elements {
                    let is_kept = match predicate {
                        Some(predicate) => self.holds(predicate, element)?,
                        None => true,
                    };
                    if is_kept {
                        mapped.push(self.with(Ok(element.clone()), transform)?);
                    }
                }
                Ok(Value::list(mapped))
            }
        }
    }

    /// Returns `deciding` if the predicate is so for one element; else the first error, if there was one.
    fn any(
        &mut self,
        elements: &[Value],
        predicate: &Node,
        deciding: bool,
    ) -> Result<bool, EvaluationError> {
        let mut result = Ok(!deciding);
        for element in elements {
            match self.holds(predicate, element) {
                Ok(holds) if holds == deciding => return Ok(deciding),
                Err(EvaluationError::OutOfSteps) => return Err(EvaluationError::OutOfSteps),
                other => result = result.and(other),
            }
        }
        result
    }

    fn holds(&mut self, predicate: &Node, element: &Value) -> Result<bool, EvaluationError> {
        bool(self.with(Ok(element.clone()), predicate)?, "a macro")
    }
}

fn bool(value: Value, function: &'static str) -> Result<bool, EvaluationError> {
    match value {
        Value::Bool(value) => Ok(value),
        _ => Err(EvaluationError::NoSuchOverload { function }),
    }
}

/// Selects a field. Within an optional, the result is an optional.
fn select(operand: &Value, field: &Key, test: Test, steps: &mut Steps) -> Evaluated {
    let (operand, is_optional) = match operand {
        Value::Optional(None) if test == Test::Presence => return Ok(Value::Bool(false)),
        Value::Optional(None) => return Ok(Value::Optional(None)),
        Value::Optional(Some(value)) => (value.as_ref(), true),
        operand => (operand, false),
    };
    let found = match operand {
        Value::Map(map) => map.find(field, steps)?,
        Value::List(_) => return Err(no_such_key(&display(field))),
        _ => None,
    };
    match (test, found) {
        (Test::Presence, found) => Ok(Value::Bool(found.is_some())),
        (Test::Value, Some(value)) if !is_optional => Ok(value.clone()),
        (Test::Value, None) if !is_optional => Err(no_such_key(&display(field))),
        (_, Some(value)) => Ok(Value::some(value.clone())),
        (_, None) => Ok(Value::Optional(None)),
    }
}

fn no_such_key(key: &impl ToString) -> EvaluationError {
    EvaluationError::NoSuchKey {
        key: key.to_string(),
    }
}

fn display(key: &Key) -> String {
    match key {
        Key::Bool(key) => key.to_string(),
        Key::Number(key) => key.to_string(),
        Key::String(key) => key.to_string(),
    }
}
