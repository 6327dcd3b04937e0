//! Makes external text safe for a line of output.

pub use nodedock_model::rule::is_unprintable;

/// Returns the text with spaces for unprintable characters, truncated to a number of bytes.
pub fn printable(text: &str, bytes_max: usize) -> String {
    let mut clean = String::new();
    for c in text.chars() {
        let c = if is_unprintable(c) { ' ' } else { c };
        if clean.len() + c.len_utf8() > bytes_max {
            break;
        }
        clean.push(c);
    }
    clean
}

/// Truncates to a number of bytes at a character boundary.
pub fn cut(text: &str, max: usize) -> String {
    let mut end = text.len().min(max);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}

/// Mark in place of what a message is shortened by.
const MARK: &str = " … ";
/// Length from which on a text is shortened in its middle: a shorter one would be a few letters of both ends.
const MIDDLE_BYTES_MIN: usize = 32;

/// Shortens a message to a number of bytes in its middle: its begin names the object, and its end the cause.
pub fn shorten(message: &str, bytes_max: usize) -> String {
    if message.len() <= bytes_max || bytes_max < MIDDLE_BYTES_MIN {
        return cut(message, bytes_max);
    }
    let room = bytes_max - MARK.len();
    let begin = cut(message, room / 2);
    let mut end = message.len() - (room - begin.len());
    while !message.is_char_boundary(end) {
        end += 1;
    }
    format!("{begin}{MARK}{}", &message[end..])
}

/// Shortens a message as [`shorten`] does, to one printable line.
pub fn one_line(message: &str, bytes_max: usize) -> String {
    shorten(message, bytes_max).replace(is_unprintable, " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unprintable_characters_become_spaces_within_bound() {
        assert_eq!(
            printable("a\r\nb\u{1b}[31m\0\u{202e}\u{200b}c", 64),
            "a  b [31m   c"
        );
        assert_eq!(printable("ééé", 5), "éé");
    }

    #[test]
    fn line_is_printable_within_bound() {
        assert_eq!(one_line("a\r\nb\u{1b}[2J\u{202e}c", 64), "a  b [2J c");
        assert_eq!(one_line("ééé", 3), "é");
        assert_eq!(one_line("ééé", 6), "ééé");
    }

    #[test]
    fn shortened_message_keeps_its_cause() {
        let devices: Vec<_> = (0..200).map(|index| format!("gpu-{index}")).collect();
        let cause = "the kernel refused it: no space left on device";
        let message = format!("claim a: devices {}: {cause}", devices.join(", "));
        for bytes_max in [128, 256, 512, 1024] {
            let short = shorten(&message, bytes_max);
            assert!(
                short.len() <= bytes_max && short.len() > bytes_max - 4,
                "{short}"
            );
            assert!(short.starts_with("claim a: devices gpu-0"), "{short}");
            assert!(short.contains(MARK) && short.ends_with(cause), "{short}");
        }
        assert_eq!(shorten(&message, message.len()), message);
        for bytes_max in 0..80 {
            let short = shorten(&"é".repeat(50), bytes_max);
            assert!(short.len() <= bytes_max, "{short}");
        }
    }
}
