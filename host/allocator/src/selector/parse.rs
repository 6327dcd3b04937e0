//! Parses text into a checked tree, on a thread whose stack is large enough for the parser.

use cel::common::ast::SourceInfo;
use nodedock_model::limit::EXPRESSION_BYTES_MAX;

use super::SelectorError;
use super::check::Checker;
use super::tree::Node;

/// Stack of the parser: it takes some 130 KiB for a pair of parentheses in a debug build, and recurses into each operator of a chain such as
/// `1+1+1`, of which an expression can have half as many as it has bytes.
const STACK_SIZE: usize =
    16 * 1024 + NESTING_MAX * 256 * 1024 + EXPRESSION_BYTES_MAX / 2 * 12 * 1024;

/// Brackets within brackets. The parser's own bound is above it.
const NESTING_MAX: usize = 48;

/// Parses and checks an expression of bounded length.
pub(super) fn compile(expression: &str) -> Result<Node, SelectorError> {
    bounded_nesting(expression)?;
    std::thread::scope(|scope| {
        // A panic of the parser ends as an error of the thread.
        std::thread::Builder::new()
            .name("selector".to_owned())
            .stack_size(STACK_SIZE)
            .spawn_scoped(scope, || parse_and_check(expression))
            .map_err(|_| SelectorError::Parser)?
            .join()
            .unwrap_or(Err(SelectorError::Parser))
    })
}

/// Counts brackets without regard to literals: a text of many opening brackets in quotes is refused too.
fn bounded_nesting(expression: &str) -> Result<(), SelectorError> {
    let mut depth = 0_usize;
    for (offset, character) in expression.chars().enumerate() {
        match character {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > NESTING_MAX {
            return Err(malformed(
                expression,
                offset,
                format!("more than {NESTING_MAX} nested brackets"),
            ));
        }
    }
    Ok(())
}

fn parse_and_check(expression: &str) -> Result<Node, SelectorError> {
    // Without macros: the checker expands them, so that a loop is one node with a bounded evaluation.
    let parser = cel::Env::default().parser();
    let (tree, source) = parser
        .parse_with_source_info(expression)
        .map_err(|errors| {
            let first = errors.errors.first();
            let (line, column) = first.map_or((1, 1), |error| error.pos);
            SelectorError::Malformed {
                line: usize::try_from(line).unwrap_or(1).max(1),
                column: usize::try_from(column).unwrap_or(1).max(1),
                problem: first.map_or_else(String::new, |error| error.msg.clone()),
            }
        })?;
    Checker::default()
        .check(&tree)
        .map_err(|problem| malformed(expression, offset(&source, problem.node), problem.text))
}

fn offset(source: &SourceInfo, node: u64) -> usize {
    source
        .offset_for(node)
        .and_then(|(start, _)| usize::try_from(start).ok())
        .unwrap_or(0)
}

/// An error at a character of the expression.
fn malformed(expression: &str, offset: usize, problem: String) -> SelectorError {
    let (mut line, mut column) = (1, 1);
    for character in expression.chars().take(offset) {
        (line, column) = if character == '\n' {
            (line + 1, 1)
        } else {
            (line, column + 1)
        };
    }
    SelectorError::Malformed {
        line,
        column,
        problem,
    }
}
