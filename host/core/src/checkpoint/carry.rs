//! Preserves fields of a newer release, at any depth of a record: finds them as the difference from the same record written again, and
//! carries them over from the value that a write replaces.

use serde_json::Value;

/// Returns whether `stored` has more fields than `known`, which is the same record as this release writes it.
pub(super) fn says_more(stored: &Value, known: &Value) -> bool {
    match (stored, known) {
        (Value::Object(stored), Value::Object(known)) => stored
            .iter()
            .any(|(name, value)| known.get(name).is_none_or(|known| says_more(value, known))),
        (Value::Array(stored), Value::Array(known)) => stored
            .iter()
            .zip(known)
            .any(|(stored, known)| says_more(stored, known)),
        _ => false,
    }
}

/// Adds to `new` the fields that `stored` has and `known` lacks: to an object those of the object in the same place, to an entry of a
/// list those of the otherwise equal entry.
pub(super) fn carry_over(stored: &Value, known: &Value, new: &mut Value) {
    match (stored, known, new) {
        (Value::Object(stored), Value::Object(known), Value::Object(new)) => {
            for (name, value) in stored {
                match (known.get(name), new.get_mut(name)) {
                    (None, None) => drop(new.insert(name.clone(), value.clone())),
                    (Some(known), Some(new)) => carry_over(value, known, new),
                    // This release has written or removed the field.
                    _ => {}
                }
            }
        }
        (Value::Array(stored), Value::Array(known), Value::Array(new)) => {
            for (stored, known) in stored
                .iter()
                .zip(known)
                .filter(|(stored, known)| says_more(stored, known))
            {
                if let Some(same) = new.iter_mut().find(|entry| *entry == known) {
                    carry_over(stored, known, same);
                }
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn carried(stored: Value, known: Value, mut new: Value) -> Value {
        carry_over(&stored, &known, &mut new);
        new
    }

    #[test]
    fn object_keeps_unknown_fields_only() {
        let stored = json!({"a": 1, "gone": {"x": 2}, "in": {"b": 1, "new": [1]}, "taken": 3});
        let known = json!({"a": 1, "gone": {}, "in": {"b": 1}});
        assert!(says_more(&stored, &known) && !says_more(&known, &known));
        let new = json!({"a": 7, "in": {"b": 8, "c": 9}, "taken": 4});
        let expected = json!({"a": 7, "in": {"b": 8, "c": 9, "new": [1]}, "taken": 4});
        assert_eq!(carried(stored, known, new), expected);
    }

    #[test]
    fn unchanged_list_entry_keeps_unknown_fields() {
        let stored = json!([{"k": 1, "x": "a"}, {"k": 2, "x": "b"}, {"k": 1, "x": "c"}, "text"]);
        let known = json!([{"k": 1}, {"k": 2}, {"k": 1}, "text"]);
        let new = json!([{"k": 3}, {"k": 1}, {"k": 2, "y": 0}, {"k": 1}]);
        let expected = json!([{"k": 3}, {"k": 1, "x": "a"}, {"k": 2, "y": 0}, {"k": 1, "x": "c"}]);
        assert_eq!(carried(stored, known, new), expected);
    }
}
