//! Counts what a file contains, in one pass that builds nothing: a file that would make the compiler, or this host, work out of proportion
//! is refused before it is validated.

use wasmparser::{Encoding, Parser, Payload};

use super::LoadError;

/// Limits on the contents of a driver's file. Other languages' compilers make one with 38 modules, 14,000 functions, the longest of 430 kB,
/// and 400 kB of types, imports, exports and the like, which stay in memory for as long as the driver is loaded.
const MODULES_MAX: usize = 256;
const FUNCTIONS_MAX: usize = 100_000;
const FUNCTION_BYTES_MAX: usize = 2 << 20;
const DECLARATION_BYTES_MAX: usize = 4 << 20;

/// Counts over all modules and components of a file.
#[derive(Debug, Default, PartialEq, Eq)]
struct Bulk {
    modules: usize,
    functions: usize,
    /// Bytes of the longest.
    function: usize,
    /// Bytes of all sections but code, data and custom ones.
    declarations: usize,
}

/// Refuses a file that contains too much. An invalid file is refused by the validator.
pub(super) fn check(bytes: &[u8]) -> Result<(), LoadError> {
    let Bulk {
        modules,
        functions,
        function,
        declarations,
    } = Bulk::of(bytes);
    for (count, max, before, after) in [
        (modules, MODULES_MAX, "", "modules and components"),
        (functions, FUNCTIONS_MAX, "", "functions"),
        (function, FUNCTION_BYTES_MAX, "a function of ", "bytes"),
        (
            declarations,
            DECLARATION_BYTES_MAX,
            "",
            "bytes of types, imports, exports and tables",
        ),
    ] {
        if count > max {
            return Err(LoadError::TooComplex {
                what: format!("has {before}{count} {after}"),
                max,
            });
        }
    }
    Ok(())
}

impl Bulk {
    fn of(bytes: &[u8]) -> Self {
        let (mut bulk, mut module) = (Self::default(), false);
        for payload in Parser::new(0).parse_all(bytes).map_while(Result::ok) {
            match payload {
                Payload::Version { encoding, .. } => {
                    module = encoding == Encoding::Module;
                    bulk.modules += 1;
                }
                // Sections after a nested part belong to the component around it.
                Payload::End(_) => module = false,
                Payload::CodeSectionStart { count, .. } => bulk.functions += count as usize,
                Payload::CodeSectionEntry(body) => {
                    bulk.function = bulk.function.max(body.range().len())
                }
                Payload::DataSection(_) | Payload::CustomSection(_) if module => {}
                Payload::CustomSection(_)
                | Payload::ModuleSection { .. }
                | Payload::ComponentSection { .. } => {}
                other => {
                    bulk.declarations += other.as_section().map_or(0, |(_, range)| range.len())
                }
            }
        }
        bulk
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_is_counted_over_all_parts() {
        let one = "(core module (type (func)) (func nop nop nop) (func) (memory 1) (data (i32.const 0) \"0123456789\"))";
        let bytes = wat::parse_str(format!("(component {one} {one} (component))")).unwrap();
        // Bodies have no locals (a byte), three instructions and an end; of declarations each module has a type (4 bytes), two
        // functions (3) and a memory (3).
        assert_eq!(
            Bulk::of(&bytes),
            Bulk {
                modules: 4,
                functions: 4,
                function: 5,
                declarations: 20
            }
        );
    }

    #[test]
    fn what_is_too_much_is_named() {
        let says = |text: String| {
            check(&wat::parse_str(text).unwrap())
                .unwrap_err()
                .to_string()
        };
        let modules = says(format!(
            "(component {})",
            "(core module)".repeat(MODULES_MAX)
        ));
        assert!(
            modules.starts_with("the file has 257 modules and components, at most 256 are taken"),
            "{modules}"
        );
        let functions = says(format!("(module {})", "(func)".repeat(FUNCTIONS_MAX + 1)));
        assert!(
            functions.starts_with("the file has 100001 functions"),
            "{functions}"
        );
        let function = says(format!(
            "(module (func {}))",
            "nop ".repeat(FUNCTION_BYTES_MAX)
        ));
        assert!(
            function.starts_with("the file has a function of 2097154 bytes"),
            "{function}"
        );
        let long = "x".repeat(90_000);
        let imports: String = (0..50)
            .map(|n| format!("(import \"{n}{long}\" \"\" (func))"))
            .collect();
        assert!(says(format!("(module {imports})")).contains("bytes of types, imports"));
    }
}
