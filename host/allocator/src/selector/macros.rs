//! Macros: calls whose arguments are expressions with a variable of their own.

use cel::common::ast::{CallExpr, Expr, IdedExpr};

use super::check::{Checked, Checker, Problem, problem};
use super::tree::{Loop, Node, Test};
use super::types::Type;

impl Checker {
    /// Expands the call if it is a macro.
    pub(super) fn expand(&mut self, id: u64, call: &CallExpr) -> Result<Option<Checked>, Problem> {
        let Some(target) = &call.target else {
            return self.expand_global(call);
        };
        let name = call.func_name.as_str();
        Ok(Some(match (name, call.args.as_slice()) {
            ("all" | "exists" | "exists_one" | "filter", [variable, predicate]) => {
                self.predicate(name, target, variable, predicate)?
            }
            ("map", [variable, transform]) => self.map_loop(target, variable, None, transform)?,
            ("map", [variable, predicate, transform]) => {
                self.map_loop(target, variable, Some(predicate), transform)?
            }
            ("bind", [variable, value, body]) if matches!(&target.expr, Expr::Ident(name) if name == "cel") =>
            {
                let value = self.node(value)?;
                let body = self.within(variable, value.of, |checker| checker.node(body))?;
                Checked {
                    node: Node::Bind {
                        value: Box::new(value.node),
                        body: Box::new(body.node),
                    },
                    of: body.of,
                }
            }
            ("optMap", [variable, body]) => self.map_optional(id, target, variable, body, false)?,
            ("optFlatMap", [variable, body]) => {
                self.map_optional(id, target, variable, body, true)?
            }
            _ => return Ok(None),
        }))
    }

    fn expand_global(&mut self, call: &CallExpr) -> Result<Option<Checked>, Problem> {
        let ("has", [argument]) = (call.func_name.as_str(), call.args.as_slice()) else {
            return Ok(None);
        };
        let Expr::Select(select) = &argument.expr else {
            return Err(problem(argument.id, "has() takes a selection of a field"));
        };
        self.field(argument.id, &select.operand, &select.field, Test::Presence)
            .map(Some)
    }

    fn predicate(
        &mut self,
        name: &str,
        range: &IdedExpr,
        variable: &IdedExpr,
        predicate: &IdedExpr,
    ) -> Result<Checked, Problem> {
        let (range, element) = self.range(range)?;
        let predicate =
            self.within(variable, element.clone(), |checker| checker.bool(predicate))?;
        let (body, of) = match name {
            "all" => (Loop::All(predicate), Type::Bool),
            "exists" => (Loop::Exists(predicate), Type::Bool),
            "filter" => (Loop::Filter(predicate), Type::list(element)),
            _ => (Loop::ExistsOne(predicate), Type::Bool),
        };
        Ok(Checked {
            node: Node::Loop { range, body },
            of,
        })
    }

    fn map_loop(
        &mut self,
        range: &IdedExpr,
        variable: &IdedExpr,
        predicate: Option<&IdedExpr>,
        transform: &IdedExpr,
    ) -> Result<Checked, Problem> {
        let (range, element) = self.range(range)?;
        let (predicate, transform) = self.within(variable, element, |checker| {
            let predicate = predicate
                .map(|predicate| checker.bool(predicate))
                .transpose()?;
            Ok((predicate, checker.node(transform)?))
        })?;
        let body = Loop::Map {
            predicate,
            transform: Box::new(transform.node),
        };
        Ok(Checked {
            node: Node::Loop { range, body },
            of: Type::list(transform.of),
        })
    }

    fn map_optional(
        &mut self,
        id: u64,
        target: &IdedExpr,
        variable: &IdedExpr,
        body: &IdedExpr,
        is_flat: bool,
    ) -> Result<Checked, Problem> {
        let optional = self.node(target)?;
        let element = Type::Param(self.types.new_parameters(1));
        if !self
            .types
            .assignable(&optional.of, &Type::optional(element.clone()))
        {
            let of = self.types.resolved(&optional.of, true);
            return Err(problem(
                target.id,
                format!("expected an optional, found {of}"),
            ));
        }
        let element = self.types.resolved(&element, false);
        let body = self.within(variable, element, |checker| checker.node(body))?;
        let of = if is_flat {
            body.of
        } else {
            Type::optional(body.of)
        };
        let none = Type::optional(Type::Param(self.types.new_parameters(1)));
        let Some(of) = self.types.joined(of, &none) else {
            return Err(problem(
                id,
                "optFlatMap takes an expression whose result is an optional",
            ));
        };
        let of = self.types.resolved(&of, false);
        let (optional, body) = (Box::new(optional.node), Box::new(body.node));
        Ok(Checked {
            node: Node::MapOptional {
                optional,
                body,
                is_flat,
            },
            of,
        })
    }

    /// Checks what a loop goes over and returns the type of its elements.
    fn range(&mut self, range: &IdedExpr) -> Result<(Box<Node>, Type), Problem> {
        let checked = self.node(range)?;
        let element = match self.types.resolved(&checked.of, false) {
            Type::List(of) => *of,
            Type::Map(of) => of.0,
            of @ (Type::Dyn | Type::Param(_)) => {
                self.types.assignable(&Type::Dyn, &of);
                Type::Dyn
            }
            other => {
                return Err(problem(
                    range.id,
                    format!("{other} has no elements to go over"),
                ));
            }
        };
        Ok((Box::new(checked.node), element))
    }

    /// Checks a part of the expression that sees one more variable.
    fn within<T>(
        &mut self,
        variable: &IdedExpr,
        of: Type,
        check: impl FnOnce(&mut Self) -> Result<T, Problem>,
    ) -> Result<T, Problem> {
        let Expr::Ident(name) = &variable.expr else {
            return Err(problem(
                variable.id,
                "the variable of a macro is a simple name",
            ));
        };
        self.variables.push((name.clone(), of));
        let checked = check(self);
        self.variables.pop();
        checked
    }
}
