//! Types of selectors and their inference: which type an expression has, and whether an argument fits a parameter.

/// A type as the checker knows it. The type of an attribute is known only at run time: it is [`Type::Dyn`].
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Type {
    Dyn,
    Null,
    Bool,
    Int,
    Uint,
    Double,
    String,
    Quantity,
    Semver,
    Device,
    List(Box<Type>),
    Map(Box<(Type, Type)>),
    Optional(Box<Type>),
    /// The type of a type, as `type(1)` has it.
    Meta(Box<Type>),
    /// A type that is still to be inferred.
    Param(usize),
}

impl Type {
    pub(super) fn list(of: Type) -> Type {
        Type::List(Box::new(of))
    }

    pub(super) fn map(key: Type, value: Type) -> Type {
        Type::Map(Box::new((key, value)))
    }

    pub(super) fn optional(of: Type) -> Type {
        Type::Optional(Box::new(of))
    }

    pub(super) fn of_type(of: Type) -> Type {
        Type::Meta(Box::new(of))
    }

    /// Returns the type with every parameter's number raised by `base`.
    pub(super) fn instantiated(&self, base: usize) -> Type {
        match self {
            Type::Param(number) => Type::Param(base + number),
            Type::List(of) => Type::list(of.instantiated(base)),
            Type::Optional(of) => Type::optional(of.instantiated(base)),
            Type::Meta(of) => Type::of_type(of.instantiated(base)),
            Type::Map(of) => Type::map(of.0.instantiated(base), of.1.instantiated(base)),
            plain => plain.clone(),
        }
    }

    /// Returns true if the type consists of at most `limit` types. Decreases `limit` by the types that it counted.
    pub(super) fn is_within(&self, limit: &mut usize) -> bool {
        let Some(left) = limit.checked_sub(1) else {
            return false;
        };
        *limit = left;
        match self {
            Type::List(of) | Type::Optional(of) | Type::Meta(of) => of.is_within(limit),
            Type::Map(of) => of.0.is_within(limit) && of.1.is_within(limit),
            _ => true,
        }
    }

    fn may_be_null(&self) -> bool {
        matches!(
            self,
            Type::Null | Type::Optional(_) | Type::Quantity | Type::Semver | Type::Device
        )
    }
}

impl std::fmt::Display for Type {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Type::Dyn | Type::Param(_) => f.write_str("dyn"),
            Type::Null => f.write_str("null"),
            Type::Bool => f.write_str("bool"),
            Type::Int => f.write_str("int"),
            Type::Uint => f.write_str("uint"),
            Type::Double => f.write_str("double"),
            Type::String => f.write_str("string"),
            Type::Quantity => f.write_str("quantity"),
            Type::Semver => f.write_str("semver"),
            Type::Device => f.write_str("device"),
            Type::List(of) => write!(f, "list({of})"),
            Type::Map(of) => write!(f, "map({}, {})", of.0, of.1),
            Type::Optional(of) => write!(f, "optional({of})"),
            Type::Meta(of) => write!(f, "type({of})"),
        }
    }
}

/// Comparisons of types that one expression may need.
const COMPARISONS_MAX: usize = 200_000;

/// The types that were inferred for parameters, with a log by which a failed attempt is undone.
#[derive(Default)]
pub(super) struct Inference {
    parameters: Vec<Option<Type>>,
    log: Vec<(usize, Option<Type>)>,
    comparisons: usize,
}

impl Inference {
    /// Returns the number of the first of `count` new parameters.
    pub(super) fn new_parameters(&mut self, count: usize) -> usize {
        let first = self.parameters.len();
        self.parameters.resize(first + count, None);
        first
    }

    /// Returns true if the types became too large to continue. The results of the other functions are meaningless then.
    pub(super) fn is_exhausted(&self) -> bool {
        self.comparisons > COMPARISONS_MAX
    }

    /// Returns true if each of `left` fits its type in `right`. The inferred types are kept only if they all fit.
    pub(super) fn all_assignable(&mut self, left: &[Type], right: &[Type]) -> bool {
        let mark = self.log.len();
        let fits = left.len() == right.len()
            && left
                .iter()
                .zip(right)
                .all(|(left, right)| self.fits(left, right));
        while !fits && self.log.len() > mark {
            let Some((parameter, previous)) = self.log.pop() else {
                break;
            };
            if let Some(slot) = self.parameters.get_mut(parameter) {
                *slot = previous;
            }
        }
        fits
    }

    pub(super) fn assignable(&mut self, left: &Type, right: &Type) -> bool {
        self.all_assignable(std::slice::from_ref(left), std::slice::from_ref(right))
    }

    /// Returns the type that elements of both types have in common.
    pub(super) fn joined(&mut self, left: Type, right: &Type) -> Option<Type> {
        self.assignable(&left, right)
            .then(|| self.most_general(left, right.clone()))
    }

    /// Returns the type with its parameters replaced by what was inferred; `to_dyn` replaces the others by `dyn`.
    pub(super) fn resolved(&mut self, of: &Type, to_dyn: bool) -> Type {
        if !self.may_go_on() {
            return Type::Dyn;
        }
        match of {
            Type::Param(parameter) => match self.inferred(*parameter) {
                Some(inferred) => self.resolved(&inferred, to_dyn),
                None if to_dyn => Type::Dyn,
                None => of.clone(),
            },
            Type::List(of) => Type::list(self.resolved(of, to_dyn)),
            Type::Optional(of) => Type::optional(self.resolved(of, to_dyn)),
            Type::Meta(of) => Type::of_type(self.resolved(of, to_dyn)),
            Type::Map(of) => Type::map(self.resolved(&of.0, to_dyn), self.resolved(&of.1, to_dyn)),
            plain => plain.clone(),
        }
    }

    fn may_go_on(&mut self) -> bool {
        self.comparisons += 1;
        !self.is_exhausted()
    }

    fn inferred(&self, parameter: usize) -> Option<Type> {
        self.parameters.get(parameter).cloned().flatten()
    }

    fn infer(&mut self, parameter: usize, of: Type) {
        if let Some(slot) = self.parameters.get_mut(parameter) {
            self.log.push((parameter, slot.replace(of)));
        }
    }

    fn fits(&mut self, left: &Type, right: &Type) -> bool {
        if !self.may_go_on() {
            return false;
        }
        if let Type::Param(parameter) = right {
            match self.substitutes(left, *parameter) {
                Substitution::Fits => return true,
                Substitution::Contradicts => return false,
                Substitution::Circular => {}
            }
        }
        if let Type::Param(parameter) = left {
            return self.substitutes(right, *parameter) == Substitution::Fits;
        }
        match (left, right) {
            (Type::Dyn, _) | (_, Type::Dyn) | (Type::Meta(_), Type::Meta(_)) => true,
            (Type::Null, other) | (other, Type::Null) => other.may_be_null(),
            (Type::List(left), Type::List(right))
            | (Type::Optional(left), Type::Optional(right)) => self.fits(left, right),
            (Type::Map(left), Type::Map(right)) => {
                self.fits(&left.0, &right.0) && self.fits(&left.1, &right.1)
            }
            (left, right) => left == right,
        }
    }

    fn substitutes(&mut self, of: &Type, parameter: usize) -> Substitution {
        if *of == Type::Param(parameter) {
            return Substitution::Fits;
        }
        let Some(known) = self.inferred(parameter) else {
            if self.refers(of, parameter) {
                return Substitution::Circular;
            }
            self.infer(parameter, of.clone());
            return Substitution::Fits;
        };
        if *of == known {
            return Substitution::Fits;
        }
        if !self.fits(of, &known) {
            return Substitution::Contradicts;
        }
        let general = self.most_general(of.clone(), known);
        if general != Type::Param(parameter) && !self.refers(&general, parameter) {
            self.infer(parameter, general);
        }
        Substitution::Fits
    }

    /// Returns true if the parameter occurs within the type.
    fn refers(&mut self, within: &Type, parameter: usize) -> bool {
        if !self.may_go_on() || *within == Type::Param(parameter) {
            return true;
        }
        match within {
            Type::Param(other) => match self.inferred(*other) {
                Some(inferred) => self.refers(&inferred, parameter),
                None => false,
            },
            Type::List(of) | Type::Optional(of) | Type::Meta(of) => self.refers(of, parameter),
            Type::Map(of) => self.refers(&of.0, parameter) || self.refers(&of.1, parameter),
            _ => false,
        }
    }

    fn most_general(&mut self, left: Type, right: Type) -> Type {
        if self.is_as_general(&left, &right) {
            left
        } else {
            right
        }
    }

    fn is_as_general(&mut self, left: &Type, right: &Type) -> bool {
        if !self.may_go_on() {
            return false;
        }
        match (left, right) {
            (Type::Dyn | Type::Param(_), _) | (Type::Meta(_), Type::Meta(_)) => true,
            (_, Type::Dyn | Type::Param(_)) => false,
            (Type::List(left), Type::List(right))
            | (Type::Optional(left), Type::Optional(right)) => self.is_as_general(left, right),
            (Type::Map(left), Type::Map(right)) => {
                self.is_as_general(&left.0, &right.0) && self.is_as_general(&left.1, &right.1)
            }
            (left, right) => left == right,
        }
    }
}

#[derive(PartialEq)]
enum Substitution {
    Fits,
    /// The parameter is known as a type that does not fit.
    Contradicts,
    /// The type contains the parameter itself.
    Circular,
}
