//! Functions that a selector may call: their names, parameters and results.

use super::types::Type::{
    self, Bool, Double, Dyn, Int, Null, Param, Quantity, Semver, String, Uint,
};

/// A function of the library. The values that it takes decide at run time which of its overloads is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Function {
    Not,
    Negate,
    Add,
    Subtract,
    Multiply,
    Divide,
    Modulo,
    Equals,
    NotEquals,
    Less,
    LessEquals,
    Greater,
    GreaterEquals,
    In,
    Index,
    OptionalIndex,
    Conditional,
    Size,
    TypeOf,
    ToBool,
    ToDouble,
    ToDyn,
    ToInt,
    ToString,
    ToUint,
    Contains,
    StartsWith,
    EndsWith,
    Matches,
    Find,
    FindAll,
    CharAt,
    IndexOf,
    LastIndexOf,
    LowerAscii,
    UpperAscii,
    Replace,
    Split,
    Substring,
    Trim,
    Join,
    IsSorted,
    Sum,
    Min,
    Max,
    Includes,
    First,
    Last,
    SetsContains,
    SetsEquivalent,
    SetsIntersects,
    OptionalOf,
    OptionalOfNonZeroValue,
    OptionalNone,
    OptionalUnwrap,
    OptionalValue,
    HasValue,
    Or,
    OrValue,
    ToQuantity,
    IsQuantity,
    Sign,
    IsInteger,
    AsInteger,
    AsApproximateFloat,
    QuantityAdd,
    QuantitySub,
    IsGreaterThan,
    IsLessThan,
    CompareTo,
    ToSemver,
    IsSemver,
    Major,
    Minor,
    Patch,
}

/// One form in which a function may be called. The first parameter of a member is its receiver.
pub(super) struct Overload {
    pub(super) is_member: bool,
    pub(super) parameters: Vec<Type>,
    pub(super) result: Type,
}

/// The number of different type parameters in an overload.
pub(super) const TYPE_PARAMETERS_MAX: usize = 2;

const A: Type = Param(0);
const B: Type = Param(1);

fn global<const N: usize>(parameters: [Type; N], result: Type) -> Overload {
    Overload {
        is_member: false,
        parameters: parameters.into(),
        result,
    }
}

fn member<const N: usize>(parameters: [Type; N], result: Type) -> Overload {
    Overload {
        is_member: true,
        parameters: parameters.into(),
        result,
    }
}

/// Returns an operator by the name that the parser gives it, or a function by its name in the source.
pub(super) fn find(name: &str) -> Option<(Function, Vec<Overload>)> {
    operator(name)
        .or_else(|| standard(name))
        .or_else(|| extension(name))
        .or_else(|| kubernetes(name))
}

fn operator(name: &str) -> Option<(Function, Vec<Overload>)> {
    let (list, map) = (|| Type::list(A), || Type::map(A, B));
    Some(match name {
        "!_" => (Function::Not, vec![global([Bool], Bool)]),
        "-_" => (
            Function::Negate,
            vec![global([Double], Double), global([Int], Int)],
        ),
        "_+_" => (
            Function::Add,
            closed_over(vec![Double, Int, list(), String, Uint]),
        ),
        "_-_" => (Function::Subtract, closed_over(vec![Double, Int, Uint])),
        "_*_" => (Function::Multiply, closed_over(vec![Double, Int, Uint])),
        "_/_" => (Function::Divide, closed_over(vec![Double, Int, Uint])),
        "_%_" => (Function::Modulo, closed_over(vec![Int, Uint])),
        "_==_" => (Function::Equals, vec![global([A, A], Bool)]),
        "_!=_" => (Function::NotEquals, vec![global([A, A], Bool)]),
        "_<_" => (Function::Less, compared()),
        "_<=_" => (Function::LessEquals, compared()),
        "_>_" => (Function::Greater, compared()),
        "_>=_" => (Function::GreaterEquals, compared()),
        "in" | "@in" => (
            Function::In,
            vec![global([A, list()], Bool), global([A, map()], Bool)],
        ),
        "_[_]" => (
            Function::Index,
            vec![
                global([list(), Int], A),
                global([map(), A], B),
                global([Type::optional(list()), Int], Type::optional(A)),
                global([Type::optional(map()), A], Type::optional(B)),
            ],
        ),
        "_[?_]" => (
            Function::OptionalIndex,
            vec![
                global([list(), Int], Type::optional(A)),
                global([Type::optional(list()), Int], Type::optional(A)),
                global([map(), A], Type::optional(B)),
                global([Type::optional(map()), A], Type::optional(B)),
            ],
        ),
        "_?_:_" => (Function::Conditional, vec![global([Bool, A, A], A)]),
        _ => return None,
    })
}

fn compared() -> Vec<Overload> {
    let numbers = [Int, Uint, Double];
    let pairs = numbers
        .iter()
        .flat_map(|left| numbers.iter().map(move |right| (left, right)));
    let mut overloads: Vec<_> = pairs
        .map(|(left, right)| global([left.clone(), right.clone()], Bool))
        .collect();
    overloads.extend([global([Bool, Bool], Bool), global([String, String], Bool)]);
    overloads
}

fn closed_over(types: Vec<Type>) -> Vec<Overload> {
    types
        .into_iter()
        .map(|of| global([of.clone(), of.clone()], of))
        .collect()
}

fn standard(name: &str) -> Option<(Function, Vec<Overload>)> {
    Some(match name {
        "size" => {
            let sized = [Type::list(A), Type::map(A, B), String];
            let both = sized
                .into_iter()
                .flat_map(|of| [global([of.clone()], Int), member([of], Int)]);
            (Function::Size, both.collect())
        }
        "type" => (Function::TypeOf, vec![global([A], Type::of_type(A))]),
        "bool" => (Function::ToBool, conversion(&[Bool, String], Bool)),
        "double" => (
            Function::ToDouble,
            conversion(&[Double, Int, String, Uint], Double),
        ),
        "dyn" => (Function::ToDyn, vec![global([A], Dyn)]),
        "int" => (
            Function::ToInt,
            conversion(&[Int, Double, String, Uint], Int),
        ),
        "string" => (
            Function::ToString,
            conversion(&[String, Bool, Double, Int, Uint], String),
        ),
        "uint" => (
            Function::ToUint,
            conversion(&[Uint, Double, Int, String], Uint),
        ),
        "contains" => (Function::Contains, of_two_strings()),
        "startsWith" => (Function::StartsWith, of_two_strings()),
        "endsWith" => (Function::EndsWith, of_two_strings()),
        "matches" => (
            Function::Matches,
            vec![
                global([String, String], Bool),
                member([String, String], Bool),
            ],
        ),
        "optional.of" => (Function::OptionalOf, vec![global([A], Type::optional(A))]),
        "optional.ofNonZeroValue" => (
            Function::OptionalOfNonZeroValue,
            vec![global([A], Type::optional(A))],
        ),
        "optional.none" => (Function::OptionalNone, vec![global([], Type::optional(A))]),
        "optional.unwrap" => (
            Function::OptionalUnwrap,
            vec![global([Type::list(Type::optional(A))], Type::list(A))],
        ),
        "unwrapOpt" => (
            Function::OptionalUnwrap,
            vec![member([Type::list(Type::optional(A))], Type::list(A))],
        ),
        "value" => (
            Function::OptionalValue,
            vec![member([Type::optional(A)], A)],
        ),
        "hasValue" => (Function::HasValue, vec![member([Type::optional(A)], Bool)]),
        "or" => (
            Function::Or,
            vec![member(
                [Type::optional(A), Type::optional(A)],
                Type::optional(A),
            )],
        ),
        "orValue" => (Function::OrValue, vec![member([Type::optional(A), A], A)]),
        "first" => (
            Function::First,
            vec![member([Type::list(A)], Type::optional(A))],
        ),
        "last" => (
            Function::Last,
            vec![member([Type::list(A)], Type::optional(A))],
        ),
        _ => return None,
    })
}

fn of_two_strings() -> Vec<Overload> {
    vec![member([String, String], Bool)]
}

fn conversion(from: &[Type], to: Type) -> Vec<Overload> {
    from.iter()
        .map(|from| global([from.clone()], to.clone()))
        .collect()
}

fn extension(name: &str) -> Option<(Function, Vec<Overload>)> {
    let strings = Type::list(String);
    Some(match name {
        "find" => (Function::Find, vec![member([String, String], String)]),
        "findAll" => (
            Function::FindAll,
            vec![
                member([String, String], strings.clone()),
                member([String, String, Int], strings),
            ],
        ),
        "charAt" => (Function::CharAt, vec![member([String, Int], String)]),
        "indexOf" => (Function::IndexOf, searches()),
        "lastIndexOf" => (Function::LastIndexOf, searches()),
        "lowerAscii" => (Function::LowerAscii, vec![member([String], String)]),
        "upperAscii" => (Function::UpperAscii, vec![member([String], String)]),
        "replace" => (
            Function::Replace,
            vec![
                member([String, String, String], String),
                member([String, String, String, Int], String),
            ],
        ),
        "split" => (
            Function::Split,
            vec![
                member([String, String], strings.clone()),
                member([String, String, Int], strings),
            ],
        ),
        "substring" => (
            Function::Substring,
            vec![
                member([String, Int], String),
                member([String, Int, Int], String),
            ],
        ),
        "trim" => (Function::Trim, vec![member([String], String)]),
        "join" => (
            Function::Join,
            vec![
                member([strings.clone()], String),
                member([strings, String], String),
            ],
        ),
        "isSorted" => (Function::IsSorted, of_ordered(|_| Bool)),
        "min" => (Function::Min, of_ordered(|of| of)),
        "max" => (Function::Max, of_ordered(|of| of)),
        "sum" => {
            let numbers = [Int, Uint, Double].into_iter();
            (
                Function::Sum,
                numbers
                    .map(|of| member([Type::list(of.clone())], of))
                    .collect(),
            )
        }
        "includes" => (Function::Includes, vec![member([Dyn, Dyn], Bool)]),
        "sets.contains" => (Function::SetsContains, of_two_lists()),
        "sets.equivalent" => (Function::SetsEquivalent, of_two_lists()),
        "sets.intersects" => (Function::SetsIntersects, of_two_lists()),
        _ => return None,
    })
}

fn of_ordered(result: fn(Type) -> Type) -> Vec<Overload> {
    let types = [Int, Uint, Double, Bool, String];
    types
        .into_iter()
        .map(|of| member([Type::list(of.clone())], result(of)))
        .collect()
}

fn of_two_lists() -> Vec<Overload> {
    vec![global([Type::list(A), Type::list(A)], Bool)]
}

fn searches() -> Vec<Overload> {
    vec![
        member([String, String], Int),
        member([String, String, Int], Int),
        member([Type::list(A), A], Int),
    ]
}

fn kubernetes(name: &str) -> Option<(Function, Vec<Overload>)> {
    Some(match name {
        "quantity" => (Function::ToQuantity, vec![global([String], Quantity)]),
        "isQuantity" => (Function::IsQuantity, vec![global([String], Bool)]),
        "sign" => (Function::Sign, vec![global([Quantity], Int)]),
        "isInteger" => (Function::IsInteger, vec![member([Quantity], Bool)]),
        "asInteger" => (Function::AsInteger, vec![member([Quantity], Int)]),
        "asApproximateFloat" => (
            Function::AsApproximateFloat,
            vec![member([Quantity], Double)],
        ),
        "add" => (Function::QuantityAdd, sums()),
        "sub" => (Function::QuantitySub, sums()),
        "isGreaterThan" => (Function::IsGreaterThan, of_both(Bool)),
        "isLessThan" => (Function::IsLessThan, of_both(Bool)),
        "compareTo" => (Function::CompareTo, of_both(Int)),
        "semver" => (Function::ToSemver, parses(Semver)),
        "isSemver" => (Function::IsSemver, parses(Bool)),
        "major" => (Function::Major, vec![member([Semver], Int)]),
        "minor" => (Function::Minor, vec![member([Semver], Int)]),
        "patch" => (Function::Patch, vec![member([Semver], Int)]),
        _ => return None,
    })
}

fn parses(result: Type) -> Vec<Overload> {
    vec![
        global([String], result.clone()),
        global([String, Bool], result),
    ]
}

fn sums() -> Vec<Overload> {
    vec![
        member([Quantity, Quantity], Quantity),
        member([Quantity, Int], Quantity),
    ]
}

fn of_both(result: Type) -> Vec<Overload> {
    vec![
        member([Quantity, Quantity], result.clone()),
        member([Semver, Semver], result),
    ]
}

/// Returns the type that an identifier such as `int` names, with the name under which `type(1)` finds it.
pub(super) fn type_named(name: &str) -> Option<(&'static str, Type)> {
    Some(match name {
        "bool" => ("bool", Bool),
        "int" => ("int", Int),
        "uint" => ("uint", Uint),
        "double" => ("double", Double),
        "string" => ("string", String),
        "null_type" => ("null_type", Null),
        "list" => ("list", Type::list(Dyn)),
        "map" => ("map", Type::map(Dyn, Dyn)),
        "type" => ("type", Type::of_type(Dyn)),
        _ => return None,
    })
}
