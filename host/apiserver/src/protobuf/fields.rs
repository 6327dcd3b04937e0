//! The fields of a message on the wire.

/// Value of a field before its type is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wire<'a> {
    Number(i64),
    Bytes(&'a [u8]),
    /// A value of eight or four bytes, which no field of Kubernetes has.
    Fixed,
}

impl<'a> Wire<'a> {
    pub(super) fn number(self) -> Option<i64> {
        if let Self::Number(number) = self {
            Some(number)
        } else {
            None
        }
    }

    pub(super) fn bytes(self) -> Option<&'a [u8]> {
        if let Self::Bytes(bytes) = self {
            Some(bytes)
        } else {
            None
        }
    }

    pub(super) fn text(self) -> Option<&'a str> {
        self.bytes()
            .and_then(|bytes| std::str::from_utf8(bytes).ok())
    }
}

/// The fields of the bytes of a message: number and content; `None` where they are torn, which is the last.
#[derive(Debug)]
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    /// A number in seven bits a byte, the lowest first.
    fn varint(&mut self) -> Option<u64> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = u64::from(*self.take(1)?.first()?);
            number |= (byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(number);
            }
        }
        None
    }

    fn field(&mut self) -> Option<(u64, Wire<'a>)> {
        let key = self.varint()?;
        let wire = match key & 7 {
            0 => Wire::Number(self.varint()?.cast_signed()),
            1 => self.take(8).map(|_| Wire::Fixed)?,
            2 => {
                let length = usize::try_from(self.varint()?).ok()?;
                Wire::Bytes(self.take(length)?)
            }
            5 => self.take(4).map(|_| Wire::Fixed)?,
            _ => return None,
        };
        Some((key >> 3, wire))
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Option<(u64, Wire<'a>)>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_none() {
            self.0 = &[];
        }
        Some(field)
    }
}
