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
    let same = |types: Vec<Type>| {
        types
            .into_iter()
            .map(|of| global([of.clone(), of.clone()], of))
            .collect()
    };
    let ordered = || {
        let numbers = [Int, Uint, Double];
        let pairs = numbers
            .iter()
            .flat_map(|left| numbers.iter().map(move |right| (left, right)));
        let mut overloads: Vec<_> = pairs
            .map(|(left, right)| global([left.clone(), right.clone()], Bool))
            .collect();
        overloads.extend([global([Bool, Bool], Bool), global([String, String], Bool)]);
        overloads
    };
    let (list, map) = (|| Type::list(A), || Type::map(A, B));
    Some(match name {
        "!_" => (Function::Not, vec![global([Bool], Bool)]),
        "-_" => (
            Function::Negate,
            vec![global([Double], Double), global([Int], Int)],
        ),
        "_+_" => (Function::Add, same(vec![Double, Int, list(), String, Uint])),
        "_-_" => (Function::Subtract, same(vec![Double, Int, Uint])),
        "_*_" => (Function::Multiply, same(vec![Double, Int, Uint])),
        "_/_" => (Function::Divide, same(vec![Double, Int, Uint])),
        "_%_" => (Function::Modulo, same(vec![Int, Uint])),
        "_==_" => (Function::Equals, vec![global([A, A], Bool)]),
        "_!=_" => (Function::NotEquals, vec![global([A, A], Bool)]),
        "_<_" => (Function::Less, ordered()),
        "_<=_" => (Function::LessEquals, ordered()),
        "_>_" => (Function::Greater, ordered()),
        "_>=_" => (Function::GreaterEquals, ordered()),
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

fn standard(name: &str) -> Option<(Function, Vec<Overload>)> {
    let conversion = |from: &[Type], to: Type| {
        from.iter()
            .map(|from| global([from.clone()], to.clone()))
            .collect()
    };
    let of_strings = || vec![member([String, String], Bool)];
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
        "contains" => (Function::Contains, of_strings()),
        "startsWith" => (Function::StartsWith, of_strings()),
        "endsWith" => (Function::EndsWith, of_strings()),
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

fn extension(name: &str) -> Option<(Function, Vec<Overload>)> {
    let strings = || Type::list(String);
    let searches = || {
        vec![
            member([String, String], Int),
            member([String, String, Int], Int),
            member([Type::list(A), A], Int),
        ]
    };
    let sets = || vec![global([Type::list(A), Type::list(A)], Bool)];
    let ordered = |result: fn(Type) -> Type| {
        let types = [Int, Uint, Double, Bool, String];
        types
            .into_iter()
            .map(|of| member([Type::list(of.clone())], result(of)))
            .collect()
    };
    Some(match name {
        "find" => (Function::Find, vec![member([String, String], String)]),
        "findAll" => (
            Function::FindAll,
            vec![
                member([String, String], strings()),
                member([String, String, Int], strings()),
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
                member([String, String], strings()),
                member([String, String, Int], strings()),
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
                member([strings()], String),
                member([strings(), String], String),
            ],
        ),
        "isSorted" => (Function::IsSorted, ordered(|_| Bool)),
        "min" => (Function::Min, ordered(|of| of)),
        "max" => (Function::Max, ordered(|of| of)),
        "sum" => {
            let of_list = |of: Type| member([Type::list(of.clone())], of);
            (
                Function::Sum,
                vec![of_list(Int), of_list(Uint), of_list(Double)],
            )
        }
        "includes" => (Function::Includes, vec![member([Dyn, Dyn], Bool)]),
        "sets.contains" => (Function::SetsContains, sets()),
        "sets.equivalent" => (Function::SetsEquivalent, sets()),
        "sets.intersects" => (Function::SetsIntersects, sets()),
        _ => return None,
    })
}

fn kubernetes(name: &str) -> Option<(Function, Vec<Overload>)> {
    let of_both = |result: Type| {
        vec![
            member([Quantity, Quantity], result.clone()),
            member([Semver, Semver], result),
        ]
    };
    let sums = || {
        vec![
            member([Quantity, Quantity], Quantity),
            member([Quantity, Int], Quantity),
        ]
    };
    let parses = |result: Type| {
        vec![
            global([String], result.clone()),
            global([String, Bool], result),
        ]
    };
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
