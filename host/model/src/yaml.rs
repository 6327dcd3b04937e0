//! YAML of Kubernetes objects, read as the clients of Kubernetes read it, which are written in Go: YAML 1.1, and then JSON.

use serde_json::{Number, Value};

/// Bound of the whole numbers that an integer of 64 bits can have: 2 to the power of 63.
const WHOLE_NUMBERS: f64 = 9_223_372_036_854_775_808.0;

/// Reads every document of a text; an empty one is null. `0755` is an octal number, and `8080.0` and `1e3` are whole numbers.
///
/// # Errors
///
/// The text is not YAML, a mapping has a key twice, or a number is not finite.
pub fn documents(text: &str) -> Result<Vec<Value>, serde_saphyr::Error> {
    let options = serde_saphyr::options! { legacy_octal_numbers: true };
    let mut documents: Vec<Value> = serde_saphyr::from_multiple_with_options(text, options)?;
    documents.iter_mut().for_each(whole_numbers);
    Ok(documents)
}

/// Makes integers of all numbers in a value that are whole: Go writes them as JSON without a fraction and without an exponent.
pub fn whole_numbers(value: &mut Value) {
    match value {
        Value::Number(number) => {
            if let Some(whole) = whole(number) {
                *number = whole;
            }
        }
        Value::Array(items) => items.iter_mut().for_each(whole_numbers),
        Value::Object(fields) => fields.values_mut().for_each(whole_numbers),
        Value::Null | Value::Bool(_) | Value::String(_) => {}
    }
}

fn whole(number: &Number) -> Option<Number> {
    let float = number.as_f64().filter(|_| number.is_f64())?;
    let is_whole = float.fract() == 0.0 && float.abs() < WHOLE_NUMBERS;
    is_whole.then(|| Number::from(float as i64))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn numbers_are_those_of_go() {
        for (text, expected) in [
            ("0755", json!(493)),
            ("0400", json!(256)),
            ("8080.0", json!(8080)),
            ("1e3", json!(1000)),
            ("-2.0", json!(-2)),
            ("0x1f", json!(31)),
            ("1_000", json!(1000)),
            ("1.5", json!(1.5)),
            ("18446744073709551615", json!(u64::MAX)),
            ("\"0755\"", json!("0755")),
            ("yes", json!(true)),
            ("off", json!(false)),
            ("1Gi", json!("1Gi")),
        ] {
            let found = documents(&format!("a: [{text}]\n")).unwrap();
            assert_eq!(found, [json!({ "a": [expected] })], "{text}");
        }
    }

    #[test]
    fn key_twice_is_refused() {
        assert!(documents("a: 1\na: 2\n").is_err());
        assert!(documents("a: [\n").is_err());
        assert!(documents("a: .inf\n").is_err());
    }
}
